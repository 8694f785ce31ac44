// @ts-check
/** System prompts that a person keeps, in this browser, for all chats. */

import { BASE } from "../requests/api.js";
import { ask } from "../page/dialogs.js";
import { byId, element } from "../page/dom.js";

const STORAGE_KEY = `lightserve:${BASE.pathname}:system_prompts`;

export class PromptLibrary {
  /** @param {HTMLTextAreaElement} field the system prompt of the chat */
  constructor(field) {
    this._field = field;
    this._select = byId("saved-prompts", HTMLSelectElement);
    this._select.addEventListener("change", (event) => {
      event.stopPropagation();
      this._use();
    });
    byId("save-prompt", HTMLButtonElement).addEventListener("click", () => this._save());
    byId("delete-prompt", HTMLButtonElement).addEventListener("click", () => this._delete());
    this.show();
  }

  /** Shows which saved prompt the chat has. */
  show() {
    const prompts = readPrompts();
    const names = Object.keys(prompts).sort((a, b) => a.localeCompare(b));
    const options = names.map((name) => element("option", { value: name }, name));
    this._select.replaceChildren(element("option", { value: "" }, "Saved prompts"), ...options);
    this._select.value = names.find((name) => prompts[name] === this._field.value) ?? "";
    this._select.hidden = names.length === 0;
    byId("delete-prompt", HTMLButtonElement).hidden = this._select.value === "";
  }

  _use() {
    const text = readPrompts()[this._select.value];
    if (text !== undefined) {
      this._field.value = text;
      this._field.dispatchEvent(new Event("input", { bubbles: true }));
    }
    this.show();
  }

  async _save() {
    const text = this._field.value.trim();
    if (text === "") {
      this._field.focus();
      return;
    }
    const value = this._select.value || text.split(/\s+/).slice(0, 4).join(" ").slice(0, 40);
    const name = await ask({ title: "Save the system prompt", confirm: "Save", input: { label: "Name", value } });
    if (name) {
      this._field.value = text;
      writePrompts({ ...readPrompts(), [name]: text });
      this.show();
    }
  }

  _delete() {
    const { [this._select.value]: _, ...rest } = readPrompts();
    writePrompts(rest);
    this.show();
    this._field.focus();
  }
}

/** @returns {Record<string, string>} by name */
function readPrompts() {
  try {
    const entries = Object.entries(JSON.parse(localStorage.getItem(STORAGE_KEY) ?? "{}"));
    return Object.fromEntries(entries.filter(([, text]) => typeof text === "string"));
  } catch {
    return {};
  }
}

/** @param {Record<string, string>} prompts */
function writePrompts(prompts) {
  localStorage.setItem(STORAGE_KEY, JSON.stringify(prompts));
}
