// The interactive documentation: Swagger UI of the service's own OpenAPI document.

SwaggerUIBundle({
  url: "openapi.json",
  dom_id: "#swagger-ui",
  deepLinking: true,
  displayOperationId: true,
  defaultModelsExpandDepth: 0,
  validatorUrl: null, // the default sends the document to another host
});
