// @ts-check
/** On a narrow screen, the list of conversations and the settings lie over the page and are opened by buttons. */

import { byId } from "./dom.js";

const DRAWERS = ["conversations", "details"];

/** @returns {() => void} closes the drawers */
export function connectDrawers() {
  for (const id of DRAWERS) {
    const toggle = byId(`${id}-toggle`, HTMLButtonElement);
    toggle.addEventListener("click", () => show(id, !isOpen(id)));
    setExpanded(id, false);
  }
  document.addEventListener("keydown", (event) => {
    const open = DRAWERS.find(isOpen);
    if (event.key === "Escape" && open !== undefined) {
      show(open, false);
      byId(`${open}-toggle`, HTMLButtonElement).focus();
    }
  });
  return () => DRAWERS.forEach((id) => show(id, false));
}

/** @param {string} id */
function isOpen(id) {
  return byId(id, HTMLElement).classList.contains("open");
}

/**
 * @param {string} id
 * @param {boolean} isShown
 */
function show(id, isShown) {
  for (const one of DRAWERS) {
    byId(one, HTMLElement).classList.toggle("open", isShown && one === id);
    setExpanded(one, isShown && one === id);
  }
  if (isShown) {
    /** @type {HTMLElement | null} */ (byId(id, HTMLElement).querySelector("summary, button, textarea"))?.focus();
  }
}

/**
 * @param {string} id
 * @param {boolean} isExpanded
 */
function setExpanded(id, isExpanded) {
  byId(`${id}-toggle`, HTMLButtonElement).setAttribute("aria-expanded", String(isExpanded));
}
