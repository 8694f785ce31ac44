// @ts-check
/** Starts Swagger UI with the schema of this server. It sends the API key that was entered on the chat page. */

const BASE = new URL(".", document.baseURI);
const KEY = localStorage.getItem(`lightserve:${BASE.pathname}:api_key`); // as in api.js of the chat page

/** @param {Record<string, any>} request */
function addKey(request) {
  if (KEY !== null) {
    request.headers = { Authorization: `Bearer ${KEY}`, ...request.headers };
  }
  return request;
}

async function start() {
  const { headers } = addKey({ headers: {} });
  const response = await fetch(new URL("openapi.json", BASE), { headers });
  if (response.ok) {
    const spec = await response.json();
    spec.servers = [{ url: BASE.href.replace(/\/$/, "") }];
    /** @type {any} */ (window).SwaggerUIBundle({
      spec,
      dom_id: "#swagger-ui",
      requestInterceptor: addKey,
      defaultModelsExpandDepth: 0,
      syntaxHighlight: { activated: false }, // it takes seconds for a long schema
    });
    return;
  }
  showMessage(
    response.status === 401
      ? "The server needs an API key. Enter it on the chat page, then load this page again."
      : `The server answered ${response.status}.`,
  );
}

/** @param {string} text */
function showMessage(text) {
  const paragraph = document.createElement("p");
  paragraph.className = "message";
  const link = document.createElement("a");
  link.href = BASE.href;
  link.textContent = "Chat page";
  paragraph.append(text, " ", link);
  document.getElementById("swagger-ui")?.replaceChildren(paragraph);
}

start();
