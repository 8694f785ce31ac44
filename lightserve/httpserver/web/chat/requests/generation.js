// @ts-check
/** One answer: the request for a conversation, and the chunks of the response as they arrive. */

import { ApiError, streamChat } from "./api.js";
import { openaiMessages } from "../conversations/conversations.js";
import { requestFields } from "../model/settings.js";

/**
 * @typedef {import("../conversations/conversations.js").Conversation} Conversation
 * @typedef {import("../conversations/conversations.js").Message} Message
 */

const RESUMES = 5; // of a stream whose connection breaks, one after the other
const RESUME_AFTER_MS = 1000;

/**
 * The body of the request. Throws a SettingsError.
 *
 * @param {Conversation} conversation
 * @param {{isContinued?: boolean}} [options] whether the last message is the begin of the answer
 */
export function requestBody(conversation, { isContinued = false } = {}) {
  return {
    messages: openaiMessages(conversation),
    stream: true,
    stream_options: { include_usage: true, continuous_usage_stats: true }, // counts of a stopped answer too
    ...(isContinued ? { continue_final_message: true, add_generation_prompt: false } : {}),
    ...requestFields(conversation.settings),
  };
}

/** @returns {Message} */
export function emptyAnswer() {
  const stats = { promptTokens: 0, cachedTokens: 0, outputTokens: 0, firstTokenMs: null, totalMs: 0 };
  return { role: "assistant", content: "", finishReason: null, stats };
}

/**
 * Fills `answer` from a stream, and calls `onChange` after each chunk. Errors and a stop are part of the answer. What it
 * has already stays.
 *
 * @param {object | null} body null: get the rest of a stream that was begun before the page was loaded
 * @param {Message} answer
 * @param {() => void} onChange
 * @param {AbortSignal} signal
 */
export async function generate(body, answer, onChange, signal) {
  const clock = new AnswerClock(answer);
  if (body !== null) {
    answer.isJson = "response_format" in body;
    answer.finishReason = null;
    delete answer.eventId;
    delete answer.error;
  }
  /** @type {object | string} */
  let from = body ?? answer.eventId ?? "";
  for (let tries = 0; ; tries += 1) {
    try {
      await readStream(from, answer, clock, onChange, signal);
      break;
    } catch (error) {
      const isBroken = !(error instanceof ApiError) || error.status === 0;
      if (signal.aborted || !isBroken || answer.eventId === undefined || tries === RESUMES) {
        addError(answer, error, signal.aborted);
        break;
      }
      from = answer.eventId;
      await new Promise((resolve) => setTimeout(resolve, RESUME_AFTER_MS));
    }
  }
  delete answer.eventId;
}

/**
 * @param {object | string} from
 * @param {Message} answer
 * @param {AnswerClock} clock
 * @param {() => void} onChange
 * @param {AbortSignal} signal
 */
async function readStream(from, answer, clock, onChange, signal) {
  for await (const { id, chunk } of streamChat(from, signal)) {
    addChunk(answer, chunk);
    answer.eventId = id;
    clock.update();
    onChange();
  }
}

/**
 * @param {Message} answer
 * @param {unknown} error
 * @param {boolean} isStopped by the person
 */
function addError(answer, error, isStopped) {
  if (isStopped) {
    answer.finishReason = "stopped";
  } else if (error instanceof ApiError && error.code === "stream_not_found") {
    answer.finishReason = "lost";
  } else {
    answer.error = error instanceof Error ? error.message : String(error);
  }
}

/** Measures an answer as the person sees it, with the network. */
class AnswerClock {
  /** @param {Message} answer */
  constructor(answer) {
    this._answer = answer;
    this._begin = performance.now() - (answer.stats?.totalMs ?? 0);
  }

  update() {
    const { stats, reasoning, content } = this._answer;
    const elapsed = performance.now() - this._begin;
    if (stats !== undefined && stats.outputTokens > 0) {
      stats.firstTokenMs ??= elapsed;
      stats.totalMs = elapsed;
    }
    if (reasoning && content === "") {
      this._answer.reasoningMs = elapsed - (stats?.firstTokenMs ?? 0);
    }
  }
}

/**
 * @param {Message} answer
 * @param {any} chunk
 */
function addChunk(answer, chunk) {
  const choice = chunk.choices[0];
  if (chunk.usage && answer.stats) {
    answer.stats.promptTokens = chunk.usage.prompt_tokens;
    answer.stats.outputTokens = (answer.stats.earlierTokens ?? 0) + chunk.usage.completion_tokens;
    answer.stats.cachedTokens = chunk.usage.prompt_tokens_details?.cached_tokens ?? 0;
  }
  if (choice === undefined) {
    return; // the last chunk has only the usage
  }
  const delta = choice.delta ?? {};
  answer.content += delta.content ?? "";
  if (delta.reasoning_content) {
    answer.reasoning = (answer.reasoning ?? "") + delta.reasoning_content;
  }
  for (const part of delta.tool_calls ?? []) {
    addToolCall(answer, part);
  }
  for (const { token, logprob, top_logprobs: others } of choice.logprobs?.content ?? []) {
    (answer.tokens ??= []).push({ token, logprob, others });
  }
  answer.finishReason = choice.finish_reason ?? answer.finishReason;
}

/**
 * The first part of a call has its id and name, the others more of its arguments.
 *
 * @param {Message} answer
 * @param {any} part
 */
function addToolCall(answer, part) {
  const calls = (answer.toolCalls ??= []);
  const call = (calls[part.index] ??= { id: "", name: "", arguments: "" });
  call.id = part.id ?? call.id;
  call.name = part.function?.name ?? call.name;
  call.arguments += part.function?.arguments ?? "";
}

/**
 * Tokens, time to the first one and speed, such as "12 prompt tokens · 40 tokens · first after 0.10 s · 55.2 tokens/s".
 *
 * @param {import("../conversations/conversations.js").AnswerStats} stats
 */
export function statsText({ promptTokens, cachedTokens, outputTokens, firstTokenMs, totalMs }) {
  if (firstTokenMs === null) {
    return "";
  }
  const parts = [`${promptTokens.toLocaleString("en")} prompt tokens`];
  if (cachedTokens > 0) {
    parts[0] += ` (${cachedTokens.toLocaleString("en")} cached)`;
  }
  parts.push(`${outputTokens.toLocaleString("en")} tokens`, `first after ${(firstTokenMs / 1000).toFixed(2)} s`);
  const decodeMs = totalMs - firstTokenMs;
  if (outputTokens > 1 && decodeMs > 0) {
    parts.push(`${(((outputTokens - 1) * 1000) / decodeMs).toFixed(1)} tokens/s`);
  }
  return parts.join(" · ");
}
