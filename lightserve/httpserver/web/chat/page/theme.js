// @ts-check
/** Light or dark: as the system has it, or as chosen here. Loaded before the first paint. */

const STORAGE_KEY = "lightserve:theme";

/** @param {string} theme "system", "light" or "dark" */
function apply(theme) {
  if (theme === "light" || theme === "dark") {
    document.documentElement.dataset.theme = theme;
  } else {
    delete document.documentElement.dataset.theme;
  }
}

/** @param {HTMLSelectElement} select the choice of the person */
export function connectThemeSelect(select) {
  select.value = localStorage.getItem(STORAGE_KEY) ?? "system";
  select.addEventListener("change", () => {
    localStorage.setItem(STORAGE_KEY, select.value);
    apply(select.value);
  });
}

apply(localStorage.getItem(STORAGE_KEY) ?? "system");
