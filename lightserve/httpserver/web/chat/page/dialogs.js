// @ts-check
/** Questions to the person, in the one dialog of the page. */

import { byId } from "./dom.js";

/**
 * @typedef {object} Question
 * @property {string} title
 * @property {string} [message]
 * @property {string} confirm the label of the button
 * @property {{label: string, value: string, isSecret?: boolean}} [input] without it, the dialog only asks to confirm
 */

/**
 * @param {Question} question
 * @returns {Promise<string | null>} what was entered, "" without an input; null if the person cancels
 */
export function ask({ title, message = "", confirm, input }) {
  const dialog = byId("text-dialog", HTMLDialogElement);
  const field = byId("text-dialog-input", HTMLInputElement);
  const label = byId("text-dialog-label", HTMLLabelElement);
  byId("text-dialog-title", HTMLHeadingElement).textContent = title;
  byId("text-dialog-message", HTMLParagraphElement).textContent = message;
  byId("text-dialog-confirm", HTMLButtonElement).textContent = confirm;
  label.hidden = input === undefined;
  label.firstElementChild?.replaceChildren(input?.label ?? "");
  field.type = input?.isSecret ? "password" : "text";
  field.required = input !== undefined;
  field.value = input?.value ?? "";
  dialog.returnValue = "";
  byId("text-dialog-confirm", HTMLButtonElement).value = "confirm";
  byId("text-dialog-cancel", HTMLButtonElement).onclick = () => dialog.close("");
  dialog.showModal();
  (input === undefined ? byId("text-dialog-confirm", HTMLButtonElement) : field).focus();
  field.select();
  return new Promise((resolve) => {
    const onClose = () => resolve(dialog.returnValue === "confirm" ? field.value.trim() : null);
    dialog.addEventListener("close", onClose, { once: true });
  });
}
