// @ts-check
/** The server's API over fetch: JSON, and chat completions as a stream of server-sent events. */

/** The path of this page. Several servers behind one proxy differ in it, and share the browser's storage. */
export const BASE = new URL(".", document.baseURI);
const CHAT = "v1/chat/completions";
const LAST_ID = "Last-Event-ID";
const RESUMABLE = "X-Resumable-Stream"; // asks the server to keep the stream for a page that is loaded again
const KEY_STORAGE = `lightserve:${BASE.pathname}:api_key`;

/** An error that the server reported. */
export class ApiError extends Error {
  /**
   * @param {number} status
   * @param {string} message
   * @param {string} [code]
   */
  constructor(status, message, code = "") {
    super(message);
    this.status = status;
    this.code = code;
  }
}

/** @type {(isWrong: boolean) => Promise<string | null>} */
let askForKey = async () => null;
/** @type {Promise<string | null> | null} */
let pendingKey = null; // several requests may be refused at once; the person is asked once

/** @param {(isWrong: boolean) => Promise<string | null>} ask returns null if the person cancels */
export function setKeyDialog(ask) {
  askForKey = ask;
}

export function hasKey() {
  return localStorage.getItem(KEY_STORAGE) !== null;
}

export function forgetKey() {
  localStorage.removeItem(KEY_STORAGE);
}

/**
 * @param {string} path relative to this page
 * @param {{asksForKey?: boolean}} [options]
 * @returns {Promise<any>}
 */
export async function getJson(path, { asksForKey = true } = {}) {
  const response = await request(path, {}, asksForKey);
  return response.json();
}

/**
 * The chunks of a streamed chat completion, with the ids of their events; undefined if the server gives none.
 *
 * @param {object | string} from the body of the request, or the id of the event after which the stream goes on
 * @param {AbortSignal} signal ends the stream, and the request on the server
 * @returns {AsyncGenerator<{id: string | undefined, chunk: any}, void, void>}
 */
export async function* streamChat(from, signal) {
  const isNew = typeof from !== "string";
  const headers = { "Content-Type": "application/json", [RESUMABLE]: "1", ...(isNew ? {} : { [LAST_ID]: from }) };
  const init = { method: "POST", headers, body: isNew ? JSON.stringify(from) : "{}", signal };
  let lastId = isNew ? undefined : from;
  signal.addEventListener("abort", () => stopStream(lastId), { once: true });
  const response = await request(CHAT, init, true);
  if (response.body === null) {
    throw new ApiError(response.status, "the response has no body");
  }
  for await (const { id, data } of eventsOf(response.body)) {
    if (data === "[DONE]") {
      return;
    }
    const chunk = JSON.parse(data);
    if (chunk.error) {
      throw new ApiError(response.status, String(chunk.error.message), String(chunk.error.code));
    }
    lastId = id;
    yield { id, chunk };
  }
  throw new ApiError(0, "the connection ended before the answer was complete");
}

/** A stream that can be resumed runs on after its client is gone: end it. @param {string | undefined} lastId */
function stopStream(lastId) {
  if (lastId !== undefined) {
    request(CHAT, { method: "DELETE", headers: { [RESUMABLE]: "1", [LAST_ID]: lastId } }, false).catch(() => {}); // it may have ended
  }
}

/**
 * Sends a request with the API key. If the server refuses the key, the person is asked for another one.
 *
 * @param {string} path
 * @param {RequestInit} init
 * @param {boolean} asksForKey
 * @returns {Promise<Response>}
 */
async function request(path, init, asksForKey) {
  for (;;) {
    const key = localStorage.getItem(KEY_STORAGE);
    const response = await send(path, init, key);
    if (response.ok) {
      return response;
    }
    const error = await errorOf(response);
    if (response.status !== 401 || !asksForKey || !(await getNewKey(key))) {
      throw error;
    }
  }
}

/**
 * @param {string} path
 * @param {RequestInit} init
 * @param {string | null} key
 */
async function send(path, init, key) {
  const headers = new Headers(init.headers);
  if (key !== null) {
    headers.set("Authorization", `Bearer ${key}`);
  }
  try {
    return await fetch(new URL(path, BASE), { ...init, headers, cache: "no-store", credentials: "omit" });
  } catch (error) {
    if (init.signal?.aborted) {
      throw error;
    }
    throw new ApiError(0, "the server cannot be reached");
  }
}

/**
 * Asks for a key after `refused` was refused. False if the person cancels.
 *
 * @param {string | null} refused
 */
async function getNewKey(refused) {
  if (localStorage.getItem(KEY_STORAGE) !== refused) {
    return true; // entered meanwhile, for another request
  }
  pendingKey ??= askForKey(refused !== null);
  const key = await pendingKey;
  pendingKey = null;
  if (key === null) {
    return false;
  }
  localStorage.setItem(KEY_STORAGE, key);
  return true;
}

/** @param {Response} response */
async function errorOf(response) {
  const text = await response.text();
  try {
    const { message, code } = JSON.parse(text).error;
    return new ApiError(response.status, String(message), String(code));
  } catch {
    return new ApiError(response.status, `status ${response.status}: ${text.slice(0, 200)}`); // of a proxy
  }
}

/**
 * Server-sent events with data.
 *
 * @param {ReadableStream<Uint8Array>} body
 * @returns {AsyncGenerator<{id: string | undefined, data: string}, void, void>}
 */
async function* eventsOf(body) {
  const reader = body.pipeThrough(/** @type {any} */ (new TextDecoderStream())).getReader();
  let buffer = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) {
        return;
      }
      const events = (buffer + value.replaceAll("\r", "")).split("\n\n");
      buffer = events.pop() ?? "";
      for (const event of events) {
        const data = fieldOf(event, "data:");
        if (data.length > 0) {
          yield { id: fieldOf(event, "id:")[0], data: data.join("\n") };
        }
      }
    }
  } finally {
    reader.cancel().catch(() => {}); // it may have failed already
  }
}

/**
 * The values of a field of an event.
 *
 * @param {string} event
 * @param {string} name with its colon
 */
function fieldOf(event, name) {
  const lines = event.split("\n").filter((line) => line.startsWith(name));
  return lines.map((line) => line.slice(name.length).trimStart());
}
