// Every metric, grouped, of one or several runs.

const curveState = { filter: "", smooth: 0, log: false };
function curvesTab() {
  const filter = el("input", { type: "search", placeholder: "filter metrics, e.g. reward", value: curveState.filter, "aria-label": "filter metrics" });
  const smooth = el("input", { type: "range", min: 0, max: 0.3, step: 0.01, value: curveState.smooth, id: "smooth" });
  const log = el("input", { type: "checkbox", checked: curveState.log, id: "log" });
  const reset = el("button", { type: "button", onclick: () => zoomAll(null) }, "reset zoom");
  const body = el("div");
  const draw = () => {
    Object.assign(curveState, { filter: filter.value.trim().toLowerCase(), smooth: Number(smooth.value), log: log.checked });
    drawCurves(body);
  };
  filter.oninput = later(draw);
  smooth.oninput = later(draw);
  log.onchange = draw;
  queueMicrotask(draw);
  return [
    el("div", { class: "controls" }, filter, el("label", { for: "smooth" }, "smoothing"), smooth,
      el("label", {}, log, " logarithmic"), reset, el("span", { class: "muted wide" }, "drag to zoom, double-click to reset")),
    DATA.runs.length > 1 ? el("p", { class: "legend" }, DATA.runs.map((run, i) => legendEntry(run.name, RUN_COLORS[i % RUN_COLORS.length]))) : null,
    DATA.runs.some((run) => Object.values(run.curves).some(([, , lows]) => lows.length)) ? el("p", { class: "muted" }, "Long curves show the mean of each stretch of steps, in a band from its smallest to its largest value.") : null,
    body,
  ];
}

function legendEntry(text, variable, title = "") {
  const dot = el("span", { class: "dot" });
  dot.style.background = `var(${variable})`;
  return el("span", { class: "entry", title }, dot, text);
}

function drawCurves(body) {
  forgetCharts();
  const groups = new Map();
  for (const name of metricNames()) {
    const info = DATA.metrics[name] || {};
    if (curveState.filter && !`${name} ${info.meaning || ""}`.toLowerCase().includes(curveState.filter)) continue;
    const title = info.group || "Other";
    groups.set(title, [...(groups.get(title) || []), name]);
  }
  const observer = new IntersectionObserver((entries) => {
    for (const entry of entries.filter((e) => e.isIntersecting)) {
      observer.unobserve(entry.target);
      entry.target.draw();
    }
  }, { rootMargin: "300px" });
  body.replaceChildren(...[...groups].map(([title, names]) => foldable(title, true, "group",
    el("span", { class: "muted" }, ` ${names.length}`),
    el("div", { class: "charts" }, names.filter((name) => !isZero(name) && !isOnce(name)).map((name) => curveCard(name, observer))),
    names.some(isOnce) ? el("p", { class: "zeros" }, `Measured once: ${names.filter(isOnce).map((name) => `${name} ${onceValues(name)}`).join(", ")}`) : "",
    names.some(isZero) ? el("p", { class: "zeros" }, `Always 0: ${names.filter(isZero).join(", ")}`) : "")));
  if (!groups.size) body.replaceChildren(el("p", { class: "empty" }, "No metric has this name."));
}

const isOnce = (name) => !isZero(name) && DATA.runs.every((run) => !run.curves[name] || run.curves[name][0].length === 1);
const onceValues = (name) => DATA.runs.map((run) => (run.curves[name] ? number(run.curves[name][1][0]) : "–")).join(" · ");
const isZero = (name) => DATA.runs.every((run) => !run.curves[name] || run.curves[name].slice(1).every((values) => values.every((value) => value === 0)));

function metricNames() {
  const names = [...new Set(DATA.runs.flatMap((run) => Object.keys(run.curves)))];
  const place = (name) => (DATA.metrics[name] ? DATA.metrics[name].place : Infinity);
  return names.sort((a, b) => (place(a) === place(b) ? 0 : place(a) - place(b)) || (a < b ? -1 : 1));
}

function curveCard(name, observer) {
  const info = DATA.metrics[name] || {};
  const lines = DATA.runs.map((run, i) => ({ curve: run.curves[name], name: run.name, color: RUN_COLORS[i % RUN_COLORS.length] })).filter((line) => line.curve);
  const value = el("output", { class: "reading" });
  const target = el("div", { class: "plot" });
  // Several runs: each figure has the dot of its run.
  const show = (figures, step) => value.replaceChildren(step === undefined ? "" : `step ${step.toLocaleString("en")}: `,
    ...figures.map(([line, figure]) => (DATA.runs.length > 1 ? legendEntry(number(figure), line.color, line.name) : number(figure))));
  const rest = () => show(lines.map((line) => [line, line.curve[1][line.curve[1].length - 1]]));
  rest();
  target.draw = () => chart(target, lines, {
    smooth: curveState.smooth,
    log: curveState.log,
    onHover: (u) => {
      const at = u.cursor.idx;
      if (at === null || at === undefined || !(u.cursor.left >= 0)) return rest();
      const figures = u.series.map((s, i) => [lines[s.line], u.data[i][at]]);
      show(figures.filter(([line, figure]) => line && figure !== null && figure !== undefined), u.data[0][at]);
    },
  });
  observer.observe(target);
  const arrow = { higher: " ↑", lower: " ↓" }[info.better] || "";
  const unit = info.unit ? ` (${info.unit})` : "";
  return el("figure", { class: "curve", id: `curve-${name}` },
    el("figcaption", {}, el("span", { class: "name", title: arrow ? `${info.better} is better` : "" }, name + arrow, el("span", { class: "muted" }, unit)), value),
    info.meaning ? el("p", { class: "meaning", title: info.meaning }, info.meaning) : null, target);
}
