// What happened, at a glance.

function overviewTab(run) {
  const [main, ...others] = run.headlines;
  return [
    el("div", { class: "heads" }, main ? headline(run, main, true) : el("p", { class: "empty" }, "No step is finished yet."), others.slice(0, 5).map((h) => headline(run, h, false))),
    run.warnings.length ? warningsCard(run) : null,
    examplesCard(run),
    el("div", { class: "columns" }, checksCard(run), timesCard(run)),
  ];
}

function headlineValue(head, value) {
  return head.is_fraction ? percent(value) : number(value);
}

/** A figure before and now, with the shape of its curve. */
function headline(run, head, isMain) {
  const change = head.now - head.before;
  const isBetter = head.better === "higher" ? change > 0 : change < 0;
  const isSame = headlineValue(head, head.before) === headlineValue(head, head.now);
  const size = head.is_fraction ? `${change > 0 ? "+" : "−"}${Math.abs(change * 100).toFixed(Math.abs(change) < 0.1 ? 1 : 0)} points` : `${change > 0 ? "+" : "−"}${number(Math.abs(change))}`;
  const state = isSame ? "same" : isBetter ? "good" : "bad";
  const tone = isSame ? "--muted" : isBetter ? "--green" : "--red";
  return el("section", { class: `card head ${isMain ? "main" : ""}` },
    el("h2", {}, head.title, el("span", { class: "muted" }, head.is_held_out ? " · held out" : " · in training")),
    el("div", { class: "change" },
      el("div", {}, el("div", { class: "figure before" }, headlineValue(head, head.before)), el("div", { class: "when" }, head.before_label)),
      el("div", { class: "arrow", "aria-hidden": "true" }, "→"),
      el("div", {}, el("div", { class: `figure ${state}` }, headlineValue(head, head.now)), el("div", { class: "when" }, head.now_label)),
      el("span", { class: `pill ${state}` }, isSame ? "unchanged" : size)),
    run.curves[head.metric] ? sparkline(run.curves[head.metric], color(tone), isMain ? 640 : 300, isMain ? 90 : 48) : null,
    el("button", { type: "button", class: "link", onclick: () => openCurve(head.metric) }, head.metric));
}

function openCurve(metric) {
  curveState.filter = metric.toLowerCase();
  openTab("curves");
}

function warningsCard(run) {
  return card("Look at this", el("ul", { class: "statements" }, run.warnings.map((w) =>
    el("li", { class: "warn" }, el("span", { class: "mark", "aria-hidden": "true" }, "!"),
      el("div", {}, el("b", {}, visible(w.text)), " ", el("span", { class: "muted" }, visible(w.advice), " · "),
        el("button", { type: "button", class: "link", onclick: () => openCurve(w.metric) }, w.metric))))));
}

function checksCard(run) {
  if (!run.checks.length) return null;
  const marks = { ok: "✓", bad: "!", unknown: "?" };
  return card("Checks", el("ul", { class: "statements" }, run.checks.map((check) =>
    el("li", { class: check.state }, el("span", { class: "mark", "aria-hidden": "true" }, marks[check.state]),
      el("div", {}, check.text, check.figure ? el("div", { class: "muted" }, check.figure) : null)))));
}

const PHASE_COLORS = ["--blue", "--orange", "--green", "--purple", "--teal", "--red", "--pink", "--brown"];

function timesCard(run) {
  const total = run.phases.reduce((sum, [, s]) => sum + s, 0);
  if (!total) return null;
  const shown = run.phases.slice(0, 7), rest = run.phases.slice(7).reduce((sum, [, s]) => sum + s, 0);
  const rows = rest ? [...shown, ["all others", rest]] : shown;
  const bar = el("div", { class: "bar", role: "img", "aria-label": "time per phase" });
  for (const [i, [name, s]] of rows.entries()) {
    const part = el("span", { title: `${name}: ${seconds(s)}` });
    part.style.flexGrow = s / total;
    part.style.background = `var(${PHASE_COLORS[i % PHASE_COLORS.length]})`;
    bar.append(part);
  }
  return card("Time", el("p", {}, `${seconds(total)} in all steps`, run.tokens_per_s ? `, ${number(run.tokens_per_s)} tokens per second on average` : ""), bar,
    el("ul", { class: "phases" }, rows.map(([name, s], i) => el("li", {}, legendEntry(name.replaceAll("_", " "), PHASE_COLORS[i % PHASE_COLORS.length]), el("span", { class: "muted" }, `${seconds(s)} · ${percent(s / total)}`)))));
}

/** Held-out prompts with the first and the last response to each. */
function examplesCard(run) {
  const pairs = examplePairs(run);
  if (!pairs.length) return null;
  const change = (run.changes || {})[pairs[0].before.set];
  const summary = change && change.total ? `Of ${change.total.toLocaleString("en")} prompts ${change.gained} score higher after step ${change.last_step} than ${change.first_step ? `after step ${change.first_step}` : "before"}, ${change.lost} lower, ${change.total - change.gained - change.lost} the same.` : "";
  return card("The same held-out prompts, before and now", summary ? el("p", { class: "muted" }, summary) : null,
    el("div", { class: "examples" }, pairs.map(({ before, now }) => exampleRow(run, before, now))));
}

function examplePairs(run) {
  const byPrompt = new Map();
  for (const group of run.groups.filter((g) => g.set !== TRAINING && g.responses.length)) {
    const key = `${group.set} ${group.source}`;
    byPrompt.set(key, [...(byPrompt.get(key) || []), group]);
  }
  const pairs = [...byPrompt.values()].filter((list) => list.length > 1).map((list) => ({ before: list[0], now: list[list.length - 1] }));
  const gain = ({ before, now }) => worthOf(now) - worthOf(before);
  const sorted = [...pairs].sort((a, b) => gain(b) - gain(a));
  // Two that gained most, one that did not change, one that lost most: not only those that flatter.
  const same = sorted.find((pair) => gain(pair) === 0);
  return [...new Set([sorted[0], sorted[1], same, sorted[sorted.length - 1]])].filter(Boolean);
}

function exampleRow(run, before, now) {
  return el("article", { class: "example" },
    el("div", { class: "pictures" }, now.images.map((hash) => picture(run, hash))),
    el("div", { class: "texts" }, promptText(now.prompt, "short"), now.label === undefined || now.label === null ? null : el("p", { class: "muted" }, "expected: ", el("b", {}, visible(now.label))),
      el("div", { class: "pair" }, exampleResponse("before", before), exampleResponse("now", now))));
}

function exampleResponse(title, group) {
  const response = group.responses[0];
  const last = response.messages && response.messages.length ? response.messages[response.messages.length - 1].text : response.text;
  const text = visible(last).trim();
  return el("div", { class: "bubble" }, el("div", { class: "muted small" }, `${title}, step ${group.step} `, rewardPill(response)),
    el("div", { class: "said" }, text ? (text.length > 280 ? `${text.slice(0, 280)}…` : text) : el("i", { class: "muted" }, "no text")));
}

/** Runs side by side: the settings that differ, and where each stands. */
function comparison() {
  const metrics = [...new Set(DATA.runs.flatMap((run) => run.headlines.slice(0, 4).map((h) => h.metric)))];
  const rows = DATA.runs.map((run) => [run.name, `${run.verb} · ${run.status.text} · step ${run.step}`, ...metrics.map((metric) => {
    const head = run.headlines.find((h) => h.metric === metric);
    return head ? `${headlineValue(head, head.before)} → ${headlineValue(head, head.now)}` : "–";
  })]);
  const differing = differences();
  return [
    card("Runs", rowsTable(["run", "state", ...metrics], rows)),
    differing.length ? card("Settings that differ", rowsTable(["setting", ...DATA.runs.map((r) => r.name)], differing)) : null,
  ];
}

function differences() {
  const names = [...new Set(DATA.runs.flatMap((run) => run.settings.map((s) => s.name)))].filter((name) => name !== "ckpt.output_dir");
  const value = (run, name) => (run.settings.find((s) => s.name === name) || { value: "–" }).value;
  return names.map((name) => [name, ...DATA.runs.map((run) => value(run, name))]).filter(([, ...values]) => new Set(values).size > 1);
}
