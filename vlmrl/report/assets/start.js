// The frame of the page: header, tabs, theme.

const TABS = { overview: "Overview", curves: "Curves", rollouts: "Rollouts", settings: "Settings" };
let tab = TABS[location.hash.slice(1)] ? location.hash.slice(1) : "overview";
let runIndex = 0;

function openTab(name) {
  tab = name;
  history.replaceState(null, "", `#${name}`);
  draw();
  window.scrollTo(0, 0);
}

function header(run) {
  const total = run.total_steps;
  const made = new Date(DATA.made * 1000);
  const title = DATA.runs.length > 1 ? `${DATA.runs.length} runs` : run.name;
  return [
    el("div", { class: "top" },
      el("h1", {}, visible(title)),
      DATA.runs.length > 1 ? null : el("span", { class: "pill" }, `vlmrl ${run.verb || "run"}`),
      DATA.runs.length > 1 ? null : el("span", { class: `pill state ${run.status.state}` }, run.status.text),
      DATA.runs.length > 1 ? null : el("span", { class: "muted" }, total ? `step ${run.step.toLocaleString("en")} of ${total.toLocaleString("en")}` : `step ${run.step.toLocaleString("en")}`),
      el("span", { class: "space" }),
      el("time", { class: "muted small", dateTime: made.toISOString(), title: `vlmrl ${DATA.version}` }, made.toLocaleString()),
      el("button", { type: "button", onclick: switchTheme, "aria-label": "light or dark", title: "light or dark" }, "◐")),
    DATA.runs.length === 1 && total && run.status.state === "running" ? progress(run.step / total) : null,
    DATA.runs.length === 1 && run.status.reason ? el("p", { class: "banner" }, visible(run.status.reason)) : null,
    el("nav", {}, Object.entries(TABS).map(([name, text]) => el("button", { type: "button", class: name === tab ? "tab on" : "tab", "aria-current": name === tab ? "page" : null, onclick: () => openTab(name) }, text))),
    DATA.runs.length > 1 && tab !== "curves" ? el("nav", { class: "runs" }, DATA.runs.map((r, i) => el("button", { type: "button", class: i === runIndex ? "tab on" : "tab", onclick: () => {
      runIndex = i;
      draw();
    } }, legendEntry(r.name, RUN_COLORS[i % RUN_COLORS.length])))) : null,
  ];
}

function progress(part) {
  const bar = el("div", { class: "progress" }, el("span"));
  bar.firstChild.style.width = `${Math.min(part, 1) * 100}%`;
  return bar;
}

function switchTheme() {
  const isDark = document.documentElement.dataset.theme ? document.documentElement.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  document.documentElement.dataset.theme = isDark ? "light" : "dark";
  draw();
}

function draw() {
  const run = DATA.runs[runIndex];
  forgetCharts();
  const tabs = {
    overview: () => [DATA.runs.length > 1 ? comparison() : null, ...overviewTab(run), DATA.runs.length > 1 ? differences(run) : null],
    curves: () => curvesTab(),
    rollouts: () => rolloutsTab(run),
    settings: () => settingsTab(run),
  };
  document.getElementById("header").replaceChildren(...header(run).filter(Boolean));
  document.getElementById("main").replaceChildren(...tabs[tab]().flat().filter(Boolean));
}

let typedAt = null;  // when the reader typed in a field that is not read before it is left
addEventListener("input", (event) => (typedAt = event.target.matches("input[type=search], input[type=number]") ? Date.now() : null));
addEventListener("change", () => (typedAt = null));
const TYPING_MS = 60000;

/** Load the page anew from time to time, but not while the reader types, and go on where the reader was. */
function follow() {
  setTimeout(() => {
    if (typedAt !== null && Date.now() - typedAt < TYPING_MS) return follow();
    sessionStorage.setItem("reader", JSON.stringify({ view, curveState, folds, runIndex, top: window.scrollY, theme: document.documentElement.dataset.theme }));
    location.reload();
  }, DATA.follow_s * 1000);
}

function resume() {
  const saved = DATA.follow_s && JSON.parse(sessionStorage.getItem("reader") || "null");
  if (!saved) return 0;
  view = saved.view;
  runIndex = Math.min(saved.runIndex, DATA.runs.length - 1);
  Object.assign(curveState, saved.curveState);
  Object.assign(folds, saved.folds);
  if (saved.theme) document.documentElement.dataset.theme = saved.theme;
  return saved.top;
}

if (DATA.runs && DATA.runs.length) {
  const top = resume();
  draw();
  window.scrollTo(0, top);
  window.addEventListener("hashchange", () => TABS[location.hash.slice(1)] && openTab(location.hash.slice(1)));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
  if (DATA.follow_s) follow();
}
