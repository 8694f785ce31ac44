// @ts-check
/**
 * Branches of a conversation. `messages` is the branch that is shown. The first message of a branch that has others
 * beside it keeps them: each of them is the rest of the conversation from there on, with branches of its own.
 */

/**
 * @typedef {import("./conversations.js").Message} Message
 *
 * @typedef {object} Branch
 * @property {number} index of the branch that is shown among all from this message on
 * @property {Message[][]} others the branches that are not shown, in order
 */

/**
 * The messages before `index` and then `message`, as a branch beside what was there.
 *
 * @param {Message[]} messages
 * @param {number} index
 * @param {Message} message
 * @returns {Message[]}
 */
export function addBranch(messages, index, message) {
  const others = allBranches(messages, index).filter(([first]) => isWorthKeeping(first));
  const added = others.length > 0 ? { ...message, branch: { index: others.length, others } } : message;
  return [...messages.slice(0, index), added];
}

/**
 * The messages with another branch from `index` on.
 *
 * @param {Message[]} messages
 * @param {number} index
 * @param {number} to the number of that branch, from 0
 * @returns {Message[]}
 */
export function switchBranch(messages, index, to) {
  const others = allBranches(messages, index);
  const [[first, ...rest]] = others.splice(to, 1);
  return [...messages.slice(0, index), { ...first, branch: { index: to, others } }, ...rest];
}

/**
 * Adds another answer beside the last message of a conversation.
 *
 * @param {Message} message
 * @param {Message} other
 */
export function addSibling(message, other) {
  message.branch ??= { index: 0, others: [] };
  message.branch.others.push([other]);
  return other;
}

/** The answers beside this one that are compared with it. @param {Message} message */
export function siblings({ branch, comparison }) {
  const others = (branch?.others ?? []).map((messages) => messages[0]);
  return comparison === undefined ? [] : others.filter((other) => other.comparison === comparison);
}

/** The number of the branch that begins with `other`, beside `message`. @param {Message} message @param {Message} other */
export function branchIndex({ branch }, other) {
  const index = (branch?.others ?? []).findIndex(([first]) => first === other);
  return index >= (branch?.index ?? 0) ? index + 1 : index;
}

/** How many branches begin with this message or beside it. @param {Message} message */
export function branchCount({ branch }) {
  return (branch?.others.length ?? 0) + 1;
}

/**
 * Every branch from `index` on, in order. The first messages have no branches: the list has them all.
 *
 * @param {Message[]} messages
 * @param {number} index
 * @returns {Message[][]}
 */
function allBranches(messages, index) {
  if (index >= messages.length) {
    return [];
  }
  const { branch, ...first } = messages[index];
  const branches = [...(branch?.others ?? [])];
  branches.splice(branch?.index ?? 0, 0, [first, ...messages.slice(index + 1)]);
  return branches;
}

/** An answer that failed before its first token is not. @param {Message} message */
function isWorthKeeping({ role, content, reasoning, toolCalls }) {
  return role !== "assistant" || content !== "" || Boolean(reasoning) || (toolCalls ?? []).length > 0;
}
