// @ts-check
/** The messages of the conversation that is shown. Of a long one, the earlier ones are built when they come into view. */

import { branchCount, branchIndex, siblings } from "../conversations/branches.js";
import { announce, button, element } from "../page/dom.js";
import { MessageView } from "./message_view.js";

/**
 * @typedef {import("../conversations/conversations.js").Conversation} Conversation
 * @typedef {import("../conversations/conversations.js").Message} Message
 *
 * @typedef {object} ListActions
 * @property {(message: Message) => void} regenerate
 * @property {() => void} continueAnswer the last one
 * @property {(message: Message, text: string) => void} edit
 * @property {(message: Message, to: number) => void} switchBranch
 * @property {(message: Message, to: number) => void} choose one of two answers that are compared
 * @property {(message: Message, results: string[]) => void} sendResults
 * @property {(text: string) => void} suggest
 */

const SUGGESTIONS = [
  "Explain how a hash table works",
  "Write a Python function that checks for palindromes",
  "Compare tea and coffee in a table",
];
const AT_END_PX = 40; // closer to the end than this, the list follows a growing answer
const PAGE = 60; // messages that are built at once; more with each step up
const MAX_PAGE = 240;
const BEFORE_VIEW_PX = 1500; // so far above the view, earlier messages are built

export class MessageList {
  /**
   * @param {HTMLElement} container
   * @param {ListActions} actions
   */
  constructor(container, actions) {
    this._container = container;
    this._actions = actions;
    /** @type {Message[]} */
    this._messages = [];
    this._keepsPlace = false;
    this._page = PAGE;
    this._first = 0; // the index of the first message that is built
    /** @type {MessageView[]} */
    this._views = []; // from that one on
    /** @type {MessageView[]} */
    this._compared = []; // answers beside the last one
    this._frame = 0;
    this._earlier = button("", () => this._showEarlier(), { class: "earlier" });
    this._observer = new IntersectionObserver(([{ isIntersecting }]) => isIntersecting && this._showEarlier(), {
      root: container,
      rootMargin: `${BEFORE_VIEW_PX}px 0px 0px`,
    });
    this._observer.observe(this._earlier);
  }

  /**
   * Shows the end of a conversation. Of what is built already, the messages there stay as they are.
   *
   * @param {Conversation} conversation
   * @param {Message[]} writing the answers that are being written
   */
  show(conversation, writing) {
    const { messages } = conversation;
    const first = Math.max(0, messages.length - PAGE);
    this._first = this._keepsPlace ? Math.min(first, this._first) : first;
    this._page = PAGE;
    this._messages = messages;
    const known = new Map(this._views.map((view) => [view.message, view]));
    this._views = messages.slice(this._first).map((message) => known.get(message) ?? this._viewOf(message));
    const last = messages[messages.length - 1];
    this._compared = last === undefined ? [] : siblings(last).map((message) => this._viewOf(message));
    this._place();
    this._update(writing);
    this._container.scrollTop = this._container.scrollHeight;
  }

  /** Shows what changed in the last message, at most once a frame. @param {Message[]} writing */
  updateLast(writing) {
    cancelAnimationFrame(this._frame);
    const update = () => {
      const { scrollHeight, scrollTop, clientHeight } = this._container;
      const isAtEnd = scrollHeight - scrollTop - clientHeight < AT_END_PX;
      this._updateViews([...this._views.slice(-1), ...this._compared], writing);
      if (isAtEnd) {
        this._container.scrollTop = this._container.scrollHeight;
      }
    };
    if (writing.length === 0) {
      update();
    } else {
      this._frame = requestAnimationFrame(update);
    }
  }

  _place() {
    const nodes = this._views.map((view) => view.node);
    if (this._compared.length > 0) {
      const pair = [...nodes.splice(-1), ...this._compared.map((view) => view.node)];
      nodes.push(element("div", { class: "comparison", role: "group", "aria-label": "Compared answers" }, ...pair));
    }
    this._earlier.textContent = `Show earlier messages (${this._first.toLocaleString("en")})`;
    this._earlier.hidden = this._first === 0;
    this._container.replaceChildren(this._earlier, ...(nodes.length === 0 ? [this._emptyNode()] : nodes));
  }

  /** Builds some more messages above; the ones that are in view stay where they are. */
  _showEarlier() {
    if (this._first === 0) {
      return;
    }
    this._page = Math.min(2 * this._page, MAX_PAGE);
    const begin = Math.max(0, this._first - this._page);
    const views = this._messages.slice(begin, this._first).map((message) => this._viewOf(message));
    this._first = begin;
    this._views.unshift(...views);
    this._updateViews(views, []);
    const { scrollHeight, scrollTop } = this._container;
    this._earlier.after(...views.map((view) => view.node));
    this._earlier.textContent = `Show earlier messages (${begin.toLocaleString("en")})`;
    this._earlier.hidden = begin === 0;
    this._container.scrollTop = scrollTop + this._container.scrollHeight - scrollHeight;
    this._observer.unobserve(this._earlier); // so that it tells again if there is still room above
    this._observer.observe(this._earlier);
  }

  /** Updates views that were not shown like this yet. @param {Message[]} writing */
  _update(writing) {
    const last = this._messages[this._messages.length - 1];
    const isOutdated = (/** @type {MessageView} */ view) => !view.isSettled || view.message === last;
    this._updateViews([...this._views.filter(isOutdated), ...this._compared], writing);
  }

  /**
   * @param {MessageView[]} views
   * @param {Message[]} writing
   */
  _updateViews(views, writing) {
    const last = this._messages[this._messages.length - 1];
    for (const view of views) {
      view.update({ isLast: view.message === last, isWriting: writing.includes(view.message) });
    }
  }

  /** @param {Message} message */
  _viewOf(message) {
    return new MessageView(message, {
      regenerate: () => this._actions.regenerate(message),
      continueAnswer: () => this._actions.continueAnswer(),
      edit: (text) => this._actions.edit(message, text),
      switchBranch: (to) => this._switchBranch(message, to),
      choose: () => this._choose(message),
      sendResults: (results) => this._actions.sendResults(message, results),
    });
  }

  /** Goes on with one of the answers that are compared. @param {Message} message */
  _choose(message) {
    const shown = this._messages[this._messages.length - 1];
    const to = message === shown ? (shown.branch?.index ?? 0) : branchIndex(shown, message);
    this._actions.choose(shown, to);
  }

  /**
   * Shows another branch. The place and the focus stay, so that one can go through all of them.
   *
   * @param {Message} message
   * @param {number} to
   */
  _switchBranch(message, to) {
    const index = this._messages.indexOf(message);
    const label = document.activeElement?.getAttribute("aria-label") ?? "";
    const { scrollTop } = this._container;
    this._keepsPlace = true; // that may be far from the end
    this._actions.switchBranch(message, to);
    this._keepsPlace = false;
    this._container.scrollTop = scrollTop;
    const view = this._views[index - this._first];
    view.focusBranchButton(label);
    const { branch } = view.message;
    announce(`Version ${(branch?.index ?? 0) + 1} of ${branchCount(view.message)}`);
  }

  _emptyNode() {
    const buttons = SUGGESTIONS.map((text) => button(text, () => this._actions.suggest(text), { class: "suggestion" }));
    return element("div", { class: "empty" }, element("h2", {}, "What can I do for you?"), ...buttons);
  }
}
