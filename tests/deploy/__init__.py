"""What is shipped to run the service elsewhere: every file there is checked against the service itself."""
