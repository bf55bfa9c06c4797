"""The HTTP server around the application: sockets, connections and shutdown."""
