// @ts-check
/** Conversations, kept in the browser: one entry of localStorage each. */

import { BASE } from "../requests/api.js";
import { contentOf } from "../requests/attachments.js";
import { DEFAULT_SETTINGS } from "../model/settings.js";

/**
 * @typedef {{id: string, name: string, arguments: string}} ToolCall
 *
 * @typedef {{token: string, logprob: number}} Choice
 * @typedef {Choice & {others: Choice[]}} Token
 *
 * @typedef {object} AnswerStats
 * @property {number} promptTokens
 * @property {number} cachedTokens
 * @property {number} outputTokens
 * @property {number} [earlierTokens] of them: those before the answer was continued
 * @property {number | null} firstTokenMs null until the first token
 * @property {number} totalMs
 *
 * @typedef {object} Message
 * @property {"user" | "assistant" | "tool"} role
 * @property {string} content
 * @property {import("../requests/attachments.js").Attachment[]} [attachments]
 * @property {string} [reasoning]
 * @property {number} [reasoningMs]
 * @property {ToolCall[]} [toolCalls]
 * @property {string} [toolCallId] of a message with the role tool
 * @property {boolean} [isJson] the content follows a JSON schema
 * @property {AnswerStats} [stats]
 * @property {string | null} [finishReason] of the server, or "stopped"
 * @property {string} [error]
 * @property {string} [eventId] of the last event that has arrived, while the server can send what follows it
 * @property {Token[]} [tokens] with their probabilities; they are not saved
 * @property {string} [comparison] the same for two answers that are shown side by side
 * @property {string} [label] of an answer in a comparison
 * @property {import("./branches.js").Branch} [branch] others beside this message
 *
 * @typedef {object} Conversation
 * @property {string} id
 * @property {string} title
 * @property {boolean} isRenamed by the person; else the title is the first message
 * @property {number} updated milliseconds since the epoch
 * @property {import("../model/settings.js").Settings} settings
 * @property {import("../model/settings.js").Settings} [otherSettings] each message is answered with these too
 * @property {Message[]} messages
 */

const PREFIX = `lightserve:${BASE.pathname}:conversation:`;
const TITLE_LENGTH = 60;
export const UNTITLED = "New chat";

export class ConversationStore {
  constructor() {
    /** @type {Map<string, Conversation>} */
    this._conversations = new Map();
    this.reload();
  }

  /** Reads what this or another tab has saved. */
  reload() {
    this._conversations.clear();
    for (const key of Object.keys(localStorage).filter((key) => key.startsWith(PREFIX))) {
      const conversation = parse(localStorage.getItem(key));
      if (conversation !== null) {
        this._conversations.set(conversation.id, conversation);
      }
    }
  }

  /** The newest first. */
  list() {
    return [...this._conversations.values()].sort((a, b) => b.updated - a.updated);
  }

  /** @param {string} id */
  get(id) {
    return this._conversations.get(id);
  }

  /**
   * A new conversation. It is saved with its first message.
   *
   * @param {import("../model/settings.js").Settings} [settings]
   * @returns {Conversation}
   */
  create(settings = DEFAULT_SETTINGS) {
    const id = Array.from(crypto.getRandomValues(new Uint32Array(4)), (part) => part.toString(36)).join("");
    return { id, title: UNTITLED, isRenamed: false, updated: Date.now(), settings: { ...settings }, messages: [] };
  }

  /**
   * Saves a conversation. Throws if the browser's storage is full.
   *
   * @param {Conversation} conversation
   */
  save(conversation) {
    const { content = "", attachments = [] } = conversation.messages[0] ?? {};
    const first = content.trim().replace(/\s+/g, " ") || attachments[0]?.name;
    if (!conversation.isRenamed && first) {
      conversation.title = first.length > TITLE_LENGTH ? `${first.slice(0, TITLE_LENGTH)}…` : first;
    }
    conversation.updated = Date.now();
    this._conversations.set(conversation.id, conversation);
    localStorage.setItem(PREFIX + conversation.id, JSON.stringify(conversation, withoutTokens));
  }

  /** @param {string} id */
  delete(id) {
    this._conversations.delete(id);
    localStorage.removeItem(PREFIX + id);
  }
}

/** Leaves out probabilities: they would fill the storage. @param {string} name @param {unknown} value */
function withoutTokens(name, value) {
  return name === "tokens" ? undefined : value;
}

/**
 * Whether the title or a message has this text; those of branches that are not shown count too.
 *
 * @param {Conversation} conversation
 * @param {string} text in small letters
 */
export function hasText({ title, messages }, text) {
  return title.toLowerCase().includes(text) || messagesHaveText(messages, text);
}

/**
 * @param {Message[]} messages
 * @param {string} text
 * @returns {boolean}
 */
function messagesHaveText(messages, text) {
  return messages.some(
    ({ content, branch }) =>
      content.toLowerCase().includes(text) || (branch?.others ?? []).some((other) => messagesHaveText(other, text)),
  );
}

/** Whether another tab changed a conversation. @param {StorageEvent} event */
export function isConversationChange(event) {
  return event.key === null || event.key.startsWith(PREFIX);
}

/**
 * The messages in OpenAI's format, as in requests and exported files.
 *
 * @param {Conversation} conversation
 * @returns {object[]}
 */
export function openaiMessages(conversation) {
  const system = conversation.settings.system.trim();
  const first = system ? [{ role: "system", content: system }] : [];
  const rest = conversation.messages.filter((message) => message.role !== "assistant" || hasOutput(message));
  return [...first, ...rest.map(openaiMessage)];
}

/** @param {Message} message */
function hasOutput(message) {
  return message.content !== "" || (message.toolCalls ?? []).length > 0;
}

/** @param {Message} message */
function openaiMessage(message) {
  const { role, reasoning, toolCalls, toolCallId } = message;
  const calls = (toolCalls ?? []).map(({ id, name, arguments: text }) => ({
    id,
    type: "function",
    function: { name, arguments: text },
  }));
  return {
    role,
    content: contentOf(message),
    ...(reasoning ? { reasoning_content: reasoning } : {}),
    ...(calls.length > 0 ? { tool_calls: calls } : {}),
    ...(toolCallId ? { tool_call_id: toolCallId } : {}),
  };
}

/**
 * @param {string | null} text
 * @returns {Conversation | null} null if it is not a conversation of this version
 */
function parse(text) {
  try {
    const found = JSON.parse(text ?? "null");
    const isValid = typeof found?.id === "string" && typeof found.title === "string" && Array.isArray(found.messages);
    if (!isValid) {
      return null;
    }
    const { settings, otherSettings } = found;
    const others = otherSettings ? { otherSettings: { ...DEFAULT_SETTINGS, ...otherSettings } } : {};
    return { ...found, settings: { ...DEFAULT_SETTINGS, ...settings }, ...others };
  } catch {
    return null;
  }
}
