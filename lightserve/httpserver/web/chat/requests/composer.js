// @ts-check
/** The field for the next message, with the files that go with it. */

import { readAttachment } from "./attachments.js";
import { chipNode } from "../messages/attachments_view.js";
import { announce, byId } from "../page/dom.js";

/**
 * @typedef {import("./attachments.js").Attachment} Attachment
 *
 * @typedef {object} ComposerActions
 * @property {() => boolean} isGenerating
 * @property {() => void} stop
 * @property {(text: string, attachments: Attachment[]) => boolean} send whether it was sent: no setting was refused
 * @property {(error: Error) => void} failed
 */

const MAX_PROMPT_PX = 240;

export class Composer {
  /** @param {ComposerActions} actions */
  constructor(actions) {
    this.seesImages = false;
    this._actions = actions;
    this._form = byId("composer", HTMLFormElement);
    this._prompt = byId("prompt", HTMLTextAreaElement);
    this._file = byId("attach-file", HTMLInputElement);
    this._chips = byId("attachments", HTMLUListElement);
    /** @type {Attachment[]} */
    this._attachments = [];
    this._connectPrompt();
    this._connectFiles();
  }

  focus() {
    this._prompt.focus();
  }

  /** Sends this text, as if it had been typed. @param {string} text */
  suggest(text) {
    this._prompt.value = text;
    this._submit();
  }

  _connectPrompt() {
    this._form.addEventListener("submit", (event) => {
      event.preventDefault();
      this._submit();
    });
    this._prompt.addEventListener("input", () => this._fit());
    this._prompt.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        if (!this._actions.isGenerating()) {
          this._submit();
        }
      }
    });
  }

  _connectFiles() {
    byId("attach", HTMLButtonElement).addEventListener("click", () => this._file.click());
    this._file.addEventListener("change", () => {
      this._attach([...(this._file.files ?? [])]);
      this._file.value = ""; // the same file may be chosen again
    });
    this._prompt.addEventListener("paste", (event) => {
      const files = [...(event.clipboardData?.files ?? [])];
      if (files.length > 0) {
        event.preventDefault();
        this._attach(files);
      }
    });
    const main = /** @type {HTMLElement} */ (this._form.parentElement);
    const carriesFiles = (/** @type {DragEvent} */ event) => event.dataTransfer?.types.includes("Files") ?? false;
    main.addEventListener("dragover", (event) => {
      if (carriesFiles(event)) {
        event.preventDefault();
        main.classList.add("drop-target");
      }
    });
    main.addEventListener("dragleave", () => main.classList.remove("drop-target"));
    main.addEventListener("drop", (event) => {
      main.classList.remove("drop-target");
      if (carriesFiles(event)) {
        event.preventDefault(); // the browser would open the file
        this._attach([...(event.dataTransfer?.files ?? [])]);
      }
    });
  }

  /** @param {File[]} files */
  async _attach(files) {
    for (const file of files) {
      try {
        this._attachments.push(await readAttachment(file, this.seesImages));
        announce(`${file.name} is attached.`);
      } catch (error) {
        this._actions.failed(/** @type {Error} */ (error));
      }
    }
    this._showAttachments();
    this._prompt.focus();
  }

  _showAttachments() {
    const remove = (/** @type {Attachment} */ attachment) => () => {
      this._attachments = this._attachments.filter((one) => one !== attachment);
      this._showAttachments();
      this._prompt.focus();
    };
    this._chips.hidden = this._attachments.length === 0;
    this._chips.replaceChildren(...this._attachments.map((one) => chipNode(one, remove(one))));
  }

  _submit() {
    const text = this._prompt.value.trim();
    if (this._actions.isGenerating()) {
      this._actions.stop();
    } else if ((text !== "" || this._attachments.length > 0) && this._actions.send(text, this._attachments)) {
      this._prompt.value = "";
      this._attachments = [];
      this._showAttachments();
      this._fit();
    }
  }

  _fit() {
    this._prompt.style.height = "auto";
    const borders = this._prompt.offsetHeight - this._prompt.clientHeight;
    this._prompt.style.height = `${Math.min(this._prompt.scrollHeight + borders, MAX_PROMPT_PX)}px`;
  }
}
