// @ts-check
/** Chats from files: those that this page exported, and lists of messages in OpenAI's format. */

import { imagesOf, isAttachment } from "../requests/attachments.js";
import { DEFAULT_SETTINGS } from "../model/settings.js";

/**
 * @typedef {import("./conversations.js").Message} Message
 *
 * @typedef {object} Imported
 * @property {Partial<import("../model/settings.js").Settings>} settings
 * @property {{title?: string, isRenamed: boolean, messages: Message[]}} parts of the conversation
 */

const ROLES = ["user", "assistant", "tool"];
const STATS = ["promptTokens", "cachedTokens", "outputTokens", "totalMs"];

/**
 * Throws an error that names the file if it has no chat.
 *
 * @param {string} name of the file
 * @param {string} text
 * @returns {Imported}
 */
export function readConversation(name, text) {
  const file = parse(name, text);
  const sent = Array.isArray(file) ? file : file?.messages;
  const hasHistory = Array.isArray(file?.history) && file.history.every(isMessage);
  if (!Array.isArray(sent) || !sent.every(isOpenaiMessage)) {
    throw new Error(`${name} is not a chat: "messages" must be a list in OpenAI's format, as in an exported chat.`);
  }
  const title = typeof file.title === "string" ? file.title : undefined;
  const system = sent.filter(({ role }) => isSystem(role)).map(({ content }) => textOf(content));
  const messages = hasHistory ? file.history : sent.filter(({ role }) => !isSystem(role)).map(messageOf);
  return {
    settings: { system: system.join("\n\n"), ...knownSettings(file.settings) },
    parts: { ...(title === undefined ? {} : { title }), isRenamed: title !== undefined, messages },
  };
}

/**
 * @param {string} name
 * @param {string} text
 * @returns {any}
 */
function parse(name, text) {
  try {
    return JSON.parse(text);
  } catch (error) {
    throw new Error(`${name} is not JSON: ${/** @type {Error} */ (error).message}`);
  }
}

/** @param {any} message */
function isOpenaiMessage(message) {
  return ROLES.includes(message?.role) || isSystem(message?.role);
}

/** @param {unknown} role */
function isSystem(role) {
  return role === "system" || role === "developer";
}

/** Whether it is a message of this page, which shows it without looking at it again. @param {any} message */
function isMessage(message) {
  const { role, content, reasoning = "", error = "", stats, toolCalls = [], attachments = [], branch } = message ?? {};
  const isCall = (/** @type {any} */ call) => [call?.id, call?.name, call?.arguments].every(isText);
  return (
    ROLES.includes(role) &&
    [content, reasoning, error].every(isText) &&
    (stats === undefined || isStats(stats)) &&
    Array.isArray(toolCalls) &&
    toolCalls.every(isCall) &&
    Array.isArray(attachments) &&
    attachments.every(isAttachment) &&
    (branch === undefined || isBranch(branch))
  );
}

/** @param {any} branch @returns {boolean} */
function isBranch(branch) {
  const others = branch?.others;
  const isSound = Number.isInteger(branch?.index) && Array.isArray(others) && others.length > 0;
  return isSound && others.every((other) => Array.isArray(other) && other.length > 0 && other.every(isMessage));
}

/** @param {any} stats */
function isStats(stats) {
  const counts = STATS.map((name) => stats?.[name]);
  return [...counts, stats?.firstTokenMs ?? 0].every((value) => typeof value === "number");
}

/** @param {unknown} value */
function isText(value) {
  return typeof value === "string";
}

/**
 * @param {any} message in OpenAI's format
 * @returns {Message}
 */
function messageOf({ role, content, reasoning_content: reasoning, tool_calls: calls, tool_call_id: toolCallId }) {
  const toolCalls = (Array.isArray(calls) ? calls : []).map((call) => ({
    id: String(call?.id ?? ""),
    name: String(call?.function?.name ?? ""),
    arguments: String(call?.function?.arguments ?? ""),
  }));
  const images = imagesOf(content);
  return {
    role,
    content: textOf(content),
    ...(images.length > 0 ? { attachments: images } : {}),
    ...(typeof reasoning === "string" ? { reasoning } : {}),
    ...(toolCalls.length > 0 ? { toolCalls } : {}),
    ...(typeof toolCallId === "string" ? { toolCallId } : {}),
  };
}

/** The text of a message's content, which may be a list of parts. @param {any} content */
function textOf(content) {
  const parts = Array.isArray(content) ? content.map((part) => part?.text) : [content];
  return parts.filter((part) => typeof part === "string").join("\n");
}

/** The settings that this page has; others are left out. @param {any} settings */
function knownSettings(settings) {
  const isKnown = (/** @type {string} */ name) => typeof settings?.[name] === "string";
  return Object.fromEntries(Object.keys(DEFAULT_SETTINGS).filter(isKnown).map((name) => [name, settings[name]]));
}
