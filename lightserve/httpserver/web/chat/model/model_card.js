// @ts-check
/** What runs, how it is computed, and the load: read every two seconds while the page is visible. */

import { ApiError, getJson } from "../requests/api.js";
import { byId, element } from "../page/dom.js";

const INTERVAL_MS = 2000;

/**
 * @typedef {object} ServerInfo the response of /get_server_info
 * @property {string} version
 * @property {Record<string, any>} model
 * @property {Record<string, number>} limits
 * @property {Record<string, number>} sampling the values of a request that sets none
 * @property {string | null} unhealthy_reason
 * @property {Record<string, number> | null} load
 */

export class ModelCard {
  /** @param {(info: ServerInfo) => void} onInfo called with the first information */
  constructor(onInfo) {
    this._onInfo = onInfo;
    this._hasInfo = false;
    this._timer = 0;
    /** @type {{tokens: number, atMs: number} | null} */
    this._lastCount = null;
    document.addEventListener("visibilitychange", () => this._schedule(0));
  }

  /** Reads now, and again every two seconds. Asks for an API key if the server wants one. */
  async start() {
    await this._refresh(true);
    this._schedule(INTERVAL_MS);
  }

  /** @param {number} delayMs */
  _schedule(delayMs) {
    clearTimeout(this._timer);
    if (document.visibilityState === "visible") {
      this._timer = window.setTimeout(async () => {
        await this._refresh(false);
        this._schedule(INTERVAL_MS);
      }, delayMs);
    }
  }

  /** @param {boolean} asksForKey */
  async _refresh(asksForKey) {
    try {
      this._show(await getJson("get_server_info", { asksForKey }));
    } catch (error) {
      const isRefused = error instanceof ApiError && error.status === 401;
      this._showStatus(isRefused ? "The server needs an API key." : String(/** @type {Error} */ (error).message), false);
    }
  }

  /** @param {ServerInfo} info */
  _show(info) {
    this._showStatus(info.unhealthy_reason ?? `Ready · LightServe ${info.version}`, info.unhealthy_reason === null);
    byId("model-facts", HTMLDListElement).replaceChildren(...rows(factsOf(info)));
    this._showLoad(info);
    if (!this._hasInfo) {
      this._hasInfo = true;
      this._onInfo(info);
    }
  }

  /**
   * @param {string} text
   * @param {boolean} isReady
   */
  _showStatus(text, isReady) {
    const status = byId("model-status", HTMLSpanElement);
    status.textContent = text;
    status.classList.toggle("ready", isReady);
  }

  /** @param {ServerInfo} info */
  _showLoad({ load, limits }) {
    byId("model-load", HTMLDivElement).hidden = load === null;
    if (load === null) {
      return;
    }
    const pool = limits.max_total_token_num;
    byId("kv-bar", HTMLProgressElement).value = load.kv_usage;
    byId("kv-text", HTMLOutputElement).textContent = `${number(load.kv_used_tokens)} of ${number(pool)} tokens`;
    const facts = { Running: number(load.running_requests), Waiting: number(load.waiting_requests) };
    byId("load-facts", HTMLDListElement).replaceChildren(
      ...rows({ ...facts, Speed: `${number(this._speed(load.generated_tokens))} tokens/s` }),
    );
  }

  /** Generated tokens a second since the last time. @param {number} tokens */
  _speed(tokens) {
    const last = this._lastCount;
    const atMs = performance.now();
    this._lastCount = { tokens, atMs };
    return last === null || tokens < last.tokens ? 0 : ((tokens - last.tokens) * 1000) / (atMs - last.atMs);
  }
}

/**
 * @param {ServerInfo} info
 * @returns {Record<string, string>}
 */
function factsOf({ model, limits }) {
  const computed = [model.architecture, model.computed].filter(Boolean).join(" ");
  const weights = model.weight_bytes
    ? `${model.weight_data_type} ${model.weight_format}, ${inUnits(model.weight_bytes)}B`
    : "";
  const others = model.names.slice(1).join(", ");
  const facts = {
    Name: model.name,
    "Also called": others,
    "Computed as": computed,
    Parameters: model.parameters ? inUnits(model.parameters) : "",
    Weights: weights,
    "Longest request": `${number(limits.max_req_total_len)} tokens`,
    Note: model.has_chat_template ? "" : "The model has no chat template: chats are refused.",
  };
  return Object.fromEntries(Object.entries(facts).filter(([, value]) => value !== ""));
}

/** @param {Record<string, string>} facts */
function rows(facts) {
  return Object.entries(facts).flatMap(([name, value]) => [element("dt", {}, name), element("dd", {}, value)]);
}

/** @param {number} value */
function number(value) {
  return Math.round(value).toLocaleString("en");
}

/** 134,515,008 as "135 M". @param {number} value */
function inUnits(value) {
  const [unit, size] = value >= 1e9 ? ["G", 1e9] : ["M", 1e6];
  return `${(value / size).toPrecision(3)} ${unit}`;
}
