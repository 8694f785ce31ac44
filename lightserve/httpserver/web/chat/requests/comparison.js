// @ts-check
/** Compares two settings: each message is answered with both. The form shows one of them at a time. */

import { byId } from "../page/dom.js";

/**
 * @typedef {import("../conversations/conversations.js").Conversation} Conversation
 * @typedef {import("../model/settings.js").Settings} Settings
 */

export class Comparison {
  /**
   * @param {() => Conversation} getConversation
   * @param {() => void} onChange other settings are to be shown, or the comparison begins or ends
   */
  constructor(getConversation, onChange) {
    this._getConversation = getConversation;
    this._onChange = onChange;
    this._side = 0;
    this._toggle = byId("compare", HTMLButtonElement);
    this._buttons = [byId("side-0", HTMLButtonElement), byId("side-1", HTMLButtonElement)];
    this._toggle.addEventListener("click", () => this._switch());
    this._buttons.forEach((button, side) => button.addEventListener("click", () => this._choose(side)));
  }

  /** Shows the first settings of the open conversation. */
  reset() {
    this._choose(0);
  }

  /** The settings that the form shows. */
  get settings() {
    const { settings, otherSettings } = this._getConversation();
    return this._side === 1 && otherSettings !== undefined ? otherSettings : settings;
  }

  /** Those that a person typed. @param {Settings} settings */
  set settings(settings) {
    const conversation = this._getConversation();
    if (this._side === 1) {
      conversation.otherSettings = settings;
    } else {
      conversation.settings = settings;
    }
  }

  _switch() {
    const conversation = this._getConversation();
    const isOn = conversation.otherSettings === undefined;
    conversation.otherSettings = isOn ? { ...conversation.settings } : undefined;
    this._choose(isOn ? 1 : 0);
  }

  /** @param {number} side */
  _choose(side) {
    const isOn = this._getConversation().otherSettings !== undefined;
    this._side = side;
    this._toggle.setAttribute("aria-pressed", String(isOn));
    byId("sides", HTMLDivElement).hidden = !isOn;
    this._buttons.forEach((button, index) => button.setAttribute("aria-pressed", String(index === side)));
    this._onChange();
  }
}
