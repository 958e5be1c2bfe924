// Light and dark: as the system has it, until somebody chooses.

const THEMES = ["", "light", "dark"];
const THEME_NAMES = { "": "as the system has them", light: "light", dark: "dark" };
const THEME_SIGNS = { "": "◐", light: "☀", dark: "☾" };
const systemIsDark = matchMedia("(prefers-color-scheme: dark)");

function isDark() {
  const chosen = document.documentElement.dataset.theme;
  return chosen ? chosen === "dark" : systemIsDark.matches;
}

function startTheme(onChange) {
  const button = byId("theme");
  const show = (theme) => {
    if (theme) document.documentElement.dataset.theme = theme;
    else delete document.documentElement.dataset.theme;
    button.textContent = THEME_SIGNS[theme];
    button.setAttribute("aria-label", `Colours: ${THEME_NAMES[theme]}`);
    button.title = `Colours: ${THEME_NAMES[theme]}`;
  };
  let theme = THEMES.find((one) => one === recall("theme")) ?? "";
  show(theme);
  button.addEventListener("click", () => {
    theme = THEMES[(THEMES.indexOf(theme) + 1) % THEMES.length];
    show(theme);
    keepInMind("theme", theme);
    onChange();
  });
  systemIsDark.addEventListener("change", onChange);
}
