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
  const isOnce = head.before === null;
  const change = head.now - head.before;
  const isBetter = head.better === "higher" ? change > 0 : change < 0;
  const isSame = isOnce || headlineValue(head, head.before) === headlineValue(head, head.now);
  const size = head.is_fraction ? `${change > 0 ? "+" : "−"}${Math.abs(change * 100).toFixed(Math.abs(change) < 0.1 ? 1 : 0)} points` : `${change > 0 ? "+" : "−"}${number(Math.abs(change))}`;
  const state = isSame ? "same" : isBetter ? "good" : "bad";
  const tone = isSame ? "--muted" : isBetter ? "--green" : "--red";
  return el("section", { class: `card head ${isMain ? "main" : ""}` },
    el("h2", {}, head.title, el("span", { class: "muted" }, head.is_held_out ? " · held out" : " · in training")),
    el("div", { class: "change" },
      isOnce ? null : el("div", {}, el("div", { class: "figure before" }, headlineValue(head, head.before)), el("div", { class: "when" }, head.before_label)),
      isOnce ? null : el("div", { class: "arrow", "aria-hidden": "true" }, "→"),
      el("div", {}, el("div", { class: `figure ${state}` }, headlineValue(head, head.now)), el("div", { class: "when" }, head.now_label)),
      isOnce ? null : el("span", { class: `pill ${state}` }, isSame ? "unchanged" : size)),
    !isOnce && run.curves[head.metric] ? sparkline(run.curves[head.metric], color(tone), isMain ? 640 : 300, isMain ? 90 : 48) : null,
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
  const steps = run.logged_steps < run.steps ? `in the ${run.logged_steps.toLocaleString("en")} logged steps of ${run.steps.toLocaleString("en")}` : run.steps ? "in all steps" : "in total";
  return card("Time", el("p", {}, `${seconds(total)} ${steps}`, run.tokens_per_s ? `, ${number(run.tokens_per_s)} tokens per second on average` : ""), bar,
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
  const gained = sorted.filter((pair) => gain(pair) > 0), lost = sorted.filter((pair) => gain(pair) < 0).reverse();
  const same = sorted.filter((pair) => gain(pair) === 0);
  // Those that changed most, first what happened to more prompts, and some that did not change: not only those that flatter.
  const change = (pairs.length && (run.changes || {})[pairs[0].before.set]) || { gained: 0, lost: 0 };
  const [more, fewer] = change.lost > change.gained ? [lost, gained] : [gained, lost];
  return [more[0], fewer[0], more[1], ...same].filter(Boolean).slice(0, 4);
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

/** Runs side by side: where each stands. */
function comparison() {
  const metrics = [...new Set(DATA.runs.flatMap((run) => run.headlines.slice(0, 4).map((h) => h.metric)))];
  const rows = DATA.runs.map((run) => [run.name, `${run.verb} · ${run.status.text} · step ${run.step}`, ...metrics.map((metric) => {
    const head = run.headlines.find((h) => h.metric === metric);
    if (!head) return "–";
    return head.before === null ? headlineValue(head, head.now) : `${headlineValue(head, head.before)} → ${headlineValue(head, head.now)}`;
  })]);
  const names = DATA.runs.some((run) => settingOf(run, "eval.dataset") === "null") ? [...DATA_OF_EVALUATION, "data.prompt_dataset", "data.eval_fraction"] : DATA_OF_EVALUATION;
  const data = names.filter((name) => new Set(DATA.runs.map((run) => settingOf(run, name))).size > 1);
  const shared = metrics.some((metric) => metric.startsWith("eval/") && DATA.runs.filter((run) => run.headlines.some((h) => h.metric === metric)).length > 1);
  return card("Runs", rowsTable(["run", "state", ...metrics], rows),
    data.length && shared ? el("p", { class: "muted" }, `The held-out figures may be of different prompts: the runs differ in ${data.join(", ")}.`) : null);
}

const DATA_OF_EVALUATION = ["eval.dataset", "eval.split", "eval.max_samples"];

function settingOf(run, name) {
  return (run.settings.find((s) => s.name === name) || { value: "–" }).value;
}

/** The settings in which runs of the same verb as this one differ: of another verb nearly all do. */
function differences(run) {
  const runs = DATA.runs.filter((r) => r.verb === run.verb);
  const names = [...new Set(runs.flatMap((r) => r.settings.map((s) => s.name)))].filter((name) => name !== "ckpt.output_dir");
  const rows = names.map((name) => [name, ...runs.map((r) => settingOf(r, name))]).filter(([, ...values]) => new Set(values).size > 1);
  if (!rows.length) return null;
  const summary = el("span", { class: "muted" }, ` ${rows.length}, of ${runs.length} runs of vlmrl ${run.verb}`);
  return el("section", { class: "card" }, foldable("Settings that differ", false, "differing", summary, rowsTable(["setting", ...runs.map((r) => r.name)], rows)));
}
