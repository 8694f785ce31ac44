// @ts-check
/** The settings of a conversation: system prompt, sampling, structured output and tools. */

/**
 * Fields as a person typed them. An empty field is not sent: the server's default holds.
 *
 * @typedef {object} Settings
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
 * @property {string} stop one string a line
 * @property {string} schema JSON
 * @property {string} tools JSON
 */

/** @type {Readonly<Settings>} */
export const DEFAULT_SETTINGS = Object.freeze({
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
  const tools = parseJson(settings, "tools");
  if (tools !== undefined && !Array.isArray(tools)) {
    throw new SettingsError("tools", "Tools: must be a JSON list");
  }
  return {
    ...fields,
    ...(stop.length > 0 ? { stop } : {}),
    ...(settings.thinking ? { chat_template_kwargs: { enable_thinking: settings.thinking === "on" } } : {}),
    ...(schema === undefined ? {} : { response_format: responseFormat(schema) }),
    ...(tools === undefined || tools.length === 0 ? {} : { tools }),
  };
}

/** @param {any} schema a JSON schema, or the value of response_format */
function responseFormat(schema) {
  const isComplete = schema !== null && ["json_schema", "json_object", "text"].includes(schema.type);
  return isComplete ? schema : { type: "json_schema", json_schema: { name: "answer", schema } };
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

  /** @param {Settings} settings */
  show(settings) {
    this._clearErrors();
    for (const name of NAMES) {
      this._field(name).value = settings[name];
    }
  }

  /** @returns {Settings} */
  read() {
    return /** @type {any} */ (Object.fromEntries(NAMES.map((name) => [name, this._field(name).value])));
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
