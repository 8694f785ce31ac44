// @ts-check
/** The open conversation: sends messages, writes answers into it, and keeps storage and page up to date. */

import { addBranch, addSibling, siblings, switchBranch } from "../conversations/branches.js";
import { announce } from "../page/dom.js";
import { emptyAnswer, generate, requestBody } from "./generation.js";
import { differences } from "../model/settings.js";

/**
 * @typedef {import("./attachments.js").Attachment} Attachment
 * @typedef {import("../conversations/conversations.js").Conversation} Conversation
 * @typedef {import("../conversations/conversations.js").Message} Message
 *
 * @typedef {object} ChatEvents
 * @property {() => void} changed the list of conversations, or which one is open
 * @property {(isGenerating: boolean) => void} generating
 * @property {(error: Error) => void} failed a request could not be made, or a conversation not be saved
 */

const SAVE_EVERY_MS = 1000; // while an answer grows

export class Chat {
  /**
   * @param {import("../conversations/conversations.js").ConversationStore} store
   * @param {import("../messages/message_list.js").MessageList} list
   * @param {ChatEvents} events
   */
  constructor(store, list, events) {
    this._store = store;
    this._list = list;
    this._events = events;
    /** @type {Conversation} */
    this.conversation = store.list()[0] ?? store.create();
    /** @type {AbortController | null} */
    this._running = null;
    /** @type {Message[]} */
    this._writing = []; // answers: one, or two to compare
    this._savedMs = 0;
    this._isLeaving = false;
  }

  get isGenerating() {
    return this._running !== null;
  }

  /** @param {Conversation} conversation */
  open(conversation) {
    this.stop();
    this.conversation = conversation;
    this._list.show(conversation, []);
    this._events.changed();
  }

  /** Gets the rest of the answers that were being written when the page was left. */
  async resume() {
    const { messages } = this.conversation;
    const last = messages[messages.length - 1];
    const answers = (last === undefined ? [] : [last, ...siblings(last)]).filter(({ eventId }) => eventId !== undefined);
    if (answers.length > 0) {
      await this._write(answers, answers.map(() => null));
    }
  }

  /** The page is left: what happens to the connection now is no part of the answer. */
  leave() {
    if (this.isGenerating) {
      this.save();
    }
    this._isLeaving = true;
  }

  /** Aborts what is being written; what has arrived stays. */
  stop() {
    for (const answer of this._writing) {
      answer.finishReason = "stopped"; // before a branch is made of it
    }
    this._writing = [];
    this._running?.abort();
    this._running = null;
    this._events.generating(false);
  }

  /**
   * @param {string} text
   * @param {Attachment[]} attachments
   */
  async send(text, attachments = []) {
    const message = { ...userMessage(text), ...(attachments.length > 0 ? { attachments } : {}) };
    await this._continue([...this.conversation.messages, message]);
  }

  /** Writes another answer beside this one. @param {Message} message */
  async regenerate(message) {
    const { messages } = this.conversation;
    const index = messages.indexOf(message);
    await this._continue(messages.slice(0, index), (answer) => addBranch(messages, index, answer));
  }

  /** Goes on where the last answer was stopped. */
  async continueAnswer() {
    const { conversation } = this;
    const answer = conversation.messages[conversation.messages.length - 1];
    const body = this._requestBody(() => requestBody(conversation, { isContinued: true }));
    if (body !== null && !this.isGenerating && answer.stats) {
      answer.stats.earlierTokens = answer.stats.outputTokens;
      await this._write([answer], [body]);
    }
  }

  /**
   * Asks again with another text, beside this message of the person and what followed it.
   *
   * @param {Message} message
   * @param {string} text
   */
  async edit(message, text) {
    const { messages } = this.conversation;
    const { attachments } = message;
    const edited = { ...userMessage(text), ...(attachments ? { attachments } : {}) };
    await this._continue(addBranch(messages, messages.indexOf(message), edited));
  }

  /**
   * Shows another branch from this message on, and ends an answer that is being written.
   *
   * @param {Message} message
   * @param {number} to
   */
  switchBranch(message, to) {
    const { conversation } = this;
    this.stop();
    conversation.messages = switchBranch(conversation.messages, conversation.messages.indexOf(message), to);
    this.save();
    this._list.show(conversation, []);
  }

  /**
   * Ends a comparison: the conversation goes on with one of the two answers.
   *
   * @param {Message} message the first of them
   * @param {number} to
   */
  choose(message, to) {
    for (const answer of [message, ...siblings(message)]) {
      delete answer.comparison;
    }
    this.switchBranch(message, to);
  }

  /**
   * @param {Message} message with tool calls
   * @param {string[]} results
   */
  async sendResults(message, results) {
    /** @type {Message[]} */
    const messages = (message.toolCalls ?? []).map(({ id }, index) => ({
      role: "tool",
      content: results[index],
      toolCallId: id,
    }));
    await this._continue([...this.conversation.messages, ...messages]);
  }

  save() {
    if (this._isLeaving) {
      return;
    }
    this._savedMs = performance.now();
    try {
      this._store.save(this.conversation);
    } catch (error) {
      this._events.failed(/** @type {Error} */ (error));
    }
  }

  /**
   * Lets the model answer these messages: twice, if two settings are compared.
   *
   * @param {Message[]} messages
   * @param {(answer: Message) => Message[]} withAnswer the conversation with the answer
   */
  async _continue(messages, withAnswer = (answer) => [...messages, answer]) {
    const { conversation } = this;
    const { settings, otherSettings } = conversation;
    const all = otherSettings === undefined ? [settings] : [settings, otherSettings];
    const bodies = this._requestBody(() => all.map((one) => requestBody({ ...conversation, settings: one, messages })));
    if (bodies === null || this.isGenerating) {
      return;
    }
    conversation.messages = withAnswer(emptyAnswer());
    const answers = [conversation.messages[conversation.messages.length - 1]];
    if (otherSettings !== undefined) {
      answers.push(addSibling(answers[0], emptyAnswer()));
      answers[0].comparison = answers[1].comparison = String(Date.now());
      answers[0].label = differences(settings, otherSettings) || "A";
      answers[1].label = differences(otherSettings, settings) || "B";
    }
    await this._write(answers, bodies);
  }

  /**
   * @param {Message[]} answers of the open conversation, side by side
   * @param {(object | null)[]} bodies of their requests; null: the stream has begun already
   */
  async _write(answers, bodies) {
    const { conversation } = this;
    const running = new AbortController();
    this._running = running;
    this._writing = [...answers];
    this.save();
    this._list.show(conversation, this._writing);
    this._events.changed();
    this._events.generating(true);
    announce("The answer is being written.");
    const write = async (/** @type {Message} */ answer, /** @type {number} */ index) => {
      await generate(bodies[index], answer, () => this._onChunk(running), running.signal);
      this._writing = this._writing.filter((one) => one !== answer);
      this._onChunk(running);
    };
    await Promise.all(answers.map(write));
    this._finish(running, conversation, answers[0]);
  }

  /**
   * @template T
   * @param {() => T} make
   * @returns {T | null} null: a setting cannot be sent
   */
  _requestBody(make) {
    try {
      return make();
    } catch (error) {
      this._events.failed(/** @type {Error} */ (error));
      return null;
    }
  }

  /** @param {AbortController} running */
  _onChunk(running) {
    if (this._running !== running) {
      return; // stopped, and perhaps another conversation is open
    }
    this._list.updateLast(this._writing);
    if (performance.now() - this._savedMs > SAVE_EVERY_MS) {
      this.save();
    }
  }

  /**
   * @param {AbortController} running
   * @param {Conversation} conversation
   * @param {Message} answer
   */
  _finish(running, conversation, answer) {
    if (this._running === running) {
      this._running = null;
      this._events.generating(false);
    }
    if (this._isLeaving) {
      return;
    }
    if (this.conversation === conversation) {
      this.save();
      this._list.updateLast([]);
      this._events.changed();
      announce(answer.error ? `Error: ${answer.error}` : `The answer is complete. ${answer.content}`);
    } else if (this._store.get(conversation.id) !== undefined) {
      this._store.save(conversation); // another one is open now; a deleted one stays deleted
    }
  }
}

/** @param {string} text @returns {Message} */
function userMessage(text) {
  return { role: "user", content: text };
}
