// @ts-check
/** The settings of a conversation: system prompt, sampling, structured output and tools. */

import { byId, element } from "../page/dom.js";

/**
 * Fields as a person typed them. An empty field is not sent: the server's default holds.
 *
 * @typedef {object} Settings
 * @property {string} model or an adapter; "" is the first model
 * @property {string} system
 * @property {string} temperature
 * @property {string} top_p
 * @property {string} top_k
 * @property {string} min_p
 * @property {string} repetition_penalty
 * @property {string} presence_penalty
 * @property {string} frequency_penalty
 * @property {string} max_tokens
 * @property {string} seed
 * @property {string} thinking "on", "off" or ""
 * @property {string} probabilities "on": those of tokens come with the answer
 * @property {string} stop one string a line
 * @property {string} schema JSON
 * @property {string} tools JSON
 */

/** @type {Readonly<Settings>} */
export const DEFAULT_SETTINGS = Object.freeze({
  model: "",
  system: "",
  temperature: "",
  top_p: "",
  top_k: "",
  min_p: "",
  repetition_penalty: "",
  presence_penalty: "",
  frequency_penalty: "",
  max_tokens: "",
  seed: "",
  thinking: "",
  probabilities: "",
  stop: "",
  schema: "",
  tools: "",
});
const NUMBERS = /** @type {const} */ ([
  "temperature",
  "top_p",
  "top_k",
  "min_p",
  "repetition_penalty",
  "presence_penalty",
  "frequency_penalty",
  "max_tokens",
  "seed",
]);
const TOP_LOGPROBS = 5;
const NAMES = /** @type {(keyof Settings)[]} */ (Object.keys(DEFAULT_SETTINGS));

/** A setting that cannot be sent. */
export class SettingsError extends Error {
  /**
   * @param {keyof Settings} field
   * @param {string} message
   */
  constructor(field, message) {
    super(message);
    this.field = field;
  }
}

/**
 * The fields of a chat request. Throws a SettingsError.
 *
 * @param {Settings} settings
 * @returns {Record<string, unknown>}
 */
export function requestFields(settings) {
  /** @type {Record<string, unknown>} */
  const fields = {};
  for (const name of NUMBERS.filter((name) => settings[name].trim() !== "")) {
    fields[name] = Number(settings[name]);
  }
  const stop = settings.stop.split("\n").filter((line) => line !== "");
  const schema = parseJson(settings, "schema");
  const tools = toolsOf(parseJson(settings, "tools"));
  return {
    ...(settings.model ? { model: settings.model } : {}),
    ...fields,
    ...(settings.probabilities ? { logprobs: true, top_logprobs: TOP_LOGPROBS } : {}),
    ...(stop.length > 0 ? { stop } : {}),
    ...(settings.thinking ? { chat_template_kwargs: { enable_thinking: settings.thinking === "on" } } : {}),
    ...(schema === undefined ? {} : { response_format: responseFormat(schema) }),
    ...(tools.length === 0 ? {} : { tools }),
  };
}

/** What names the settings that differ, above two answers to compare. @param {Settings} settings @param {Settings} others */
export function differences(settings, others) {
  const names = NAMES.filter((name) => settings[name] !== others[name]);
  return names.map((name) => `${name} ${settings[name].slice(0, 40) || "default"}`).join(", ");
}

/** @param {any} schema a JSON schema, or the value of response_format */
function responseFormat(schema) {
  const isComplete = schema !== null && ["json_schema", "json_object", "text"].includes(schema.type);
  return isComplete ? schema : { type: "json_schema", json_schema: { name: "answer", schema } };
}

/**
 * Tools in OpenAI's format, from one or a list of them, of those of Anthropic or MCP, or of plain JSON schemas with a title.
 *
 * @param {any} given
 * @returns {any[]}
 */
function toolsOf(given) {
  return (given === undefined ? [] : Array.isArray(given) ? given : [given]).map((tool) => {
    if (typeof tool?.type === "string" && tool.type !== "object") {
      return tool; // in OpenAI's format, or of a type that the server knows
    }
    const { name, title, description, parameters, input_schema: input, inputSchema, ...rest } = tool?.function ?? tool ?? {};
    if (typeof (name ?? title) !== "string") {
      throw new SettingsError("tools", 'Tools: each needs a "name", or a "title" if it is a JSON schema');
    }
    const schema = parameters ?? input ?? inputSchema ?? rest;
    return { type: "function", function: { name: name ?? title, description: description ?? "", parameters: schema } };
  });
}

/**
 * @param {Settings} settings
 * @param {"schema" | "tools"} field
 */
function parseJson(settings, field) {
  if (settings[field].trim() === "") {
    return undefined;
  }
  try {
    return JSON.parse(settings[field]);
  } catch (error) {
    throw new SettingsError(field, `Not JSON: ${/** @type {Error} */ (error).message}`);
  }
}

/** Chooses a model, also one that the server does not list any more. @param {HTMLSelectElement} field @param {string} model */
function showModel(field, model) {
  field.value = model;
  if (field.value !== model) {
    field.append(element("option", { value: model }, model));
    field.value = model;
  }
}

/** The form with the settings of the conversation that is shown. */
export class SettingsForm {
  /**
   * @param {HTMLFormElement} form
   * @param {(settings: Settings) => void} onChange
   */
  constructor(form, onChange) {
    this._form = form;
    form.addEventListener("submit", (event) => event.preventDefault());
    form.addEventListener("input", () => {
      this._clearErrors();
      onChange(this.read());
    });
  }

  get systemPrompt() {
    return /** @type {HTMLTextAreaElement} */ (this._field("system"));
  }

  /** @param {Settings} settings */
  show(settings) {
    this._clearErrors();
    for (const name of NAMES.filter((name) => name !== "model")) {
      this._field(name).value = settings[name];
    }
    showModel(/** @type {HTMLSelectElement} */ (this._field("model")), settings.model);
  }

  /** @returns {Settings} */
  read() {
    return /** @type {any} */ (Object.fromEntries(NAMES.map((name) => [name, this._field(name).value])));
  }

  /** Offers these models and adapters, if there are several. @param {{id: string, parent: string | null}[]} models */
  showModels(models) {
    const field = /** @type {HTMLSelectElement} */ (this._field("model"));
    const { value } = field;
    const options = models.map(({ id, parent }, index) => {
      const label = parent === null ? id : `${id} (adapter of ${parent})`;
      return element("option", { value: index === 0 ? "" : id }, label);
    });
    field.replaceChildren(...options);
    showModel(field, value);
    byId("model-choice", HTMLLabelElement).hidden = models.length < 2;
  }

  /** Shows in empty fields what holds without them. @param {Record<string, number | string>} defaults */
  showDefaults(defaults) {
    for (const name of NUMBERS) {
      this._field(name).setAttribute("placeholder", String(defaults[name] ?? "default"));
    }
  }

  /** @param {SettingsError} error */
  showError(error) {
    const field = this._field(error.field);
    const text = document.getElementById(`${error.field}-error`);
    const group = field.closest("details");
    if (group !== null) {
      group.open = true;
    }
    if (text !== null) {
      text.textContent = error.message;
    }
    field.setAttribute("aria-invalid", "true");
    field.focus();
  }

  _clearErrors() {
    for (const text of this._form.querySelectorAll(".field-error")) {
      text.textContent = "";
    }
    for (const field of this._form.querySelectorAll("[aria-invalid]")) {
      field.removeAttribute("aria-invalid");
    }
  }

  /**
   * @param {keyof Settings} name
   * @returns {HTMLInputElement | HTMLTextAreaElement | HTMLSelectElement}
   */
  _field(name) {
    return /** @type {any} */ (this._form.elements.namedItem(name));
  }
}
