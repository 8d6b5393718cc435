// Browse prompts and responses.

const PAGE = 8;
const TRAINING = "";  // the set of training prompts; sets of evaluations have names
let view = null;

function freshView(run) {
  const sets = [...new Set(run.groups.map((group) => group.set))];
  const set = sets.includes(TRAINING) ? TRAINING : sets[0];
  const steps = stepsOf(run, set);
  return { run: run.name, set, step: steps.length ? steps[steps.length - 1] : null, source: null, text: "", low: "", high: "", short: "", long: "", flag: "", order: "given", shade: "none", count: PAGE };
}

function stepsOf(run, set) {
  return [...new Set(run.groups.filter((g) => g.set === set).map((g) => g.step))].sort((a, b) => a - b);
}

function rolloutsTab(run) {
  if (!run.groups.length) {
    const reason = run.notes.length ? `${run.notes.join(". ")}: a page of more MiB (report.max_mib) has room for them.` : run.verb === "rl" ? "No responses are written yet." : "This run samples no responses, or does not write them.";
    return [card("Rollouts", el("p", { class: "empty" }, reason))];
  }
  if (!view || view.run !== run.name) view = freshView(run);
  const body = el("div"), controls = el("div");
  const draw = () => {
    controls.replaceChildren(...rolloutControls(run, draw));
    drawGroups(run, body, draw);
  };
  draw();
  return [controls, body, run.notes.length ? el("p", { class: "muted" }, run.notes.join(". "), ".") : null];
}

function rolloutControls(run, draw) {
  const set = (name, value) => {
    view[name] = value;
    view.count = PAGE;
    draw();
  };
  const sets = [...new Set(run.groups.map((g) => g.set))];
  const steps = stepsOf(run, view.set);
  const at = steps.indexOf(view.step);
  const pick = (name, options, title) => {
    const select = el("select", { "aria-label": title, onchange: () => set(name, select.value) }, Object.entries(options).map(([value, text]) => el("option", { value, selected: view[name] === value }, text)));
    return select;
  };
  const field = (name, placeholder, type = "number") => {
    const input = el("input", { type, step: "any", value: view[name], placeholder, "aria-label": placeholder, class: type === "number" ? "narrow" : "" });
    input.onchange = () => set(name, input.value);
    return input;
  };
  const move = (by) => set("step", steps[Math.max(0, Math.min(steps.length - 1, (at < 0 ? 0 : at) + by))]);
  const slider = el("input", { type: "range", min: 0, max: Math.max(steps.length - 1, 0), value: at < 0 ? steps.length - 1 : at, "aria-label": "step", class: "steps", disabled: at < 0 });
  slider.oninput = later(() => set("step", steps[Number(slider.value)]), 60);
  const all = el("input", { type: "checkbox", checked: view.step === null, onchange: () => set("step", all.checked ? null : steps[steps.length - 1]) });
  const setSelect = el("select", { "aria-label": "set", onchange: () => {
    view.set = setSelect.value;
    view.source = null;
    const of = stepsOf(run, view.set);
    set("step", of[of.length - 1]);
  } }, sets.map((name) => el("option", { value: name, selected: view.set === name }, name === TRAINING ? "training" : `evaluation: ${name}`)));
  const traced = run.groups.some((g) => g.responses.some((r) => r.trace));
  return [
    el("div", { class: "controls card" },
      setSelect,
      el("button", { type: "button", disabled: at <= 0, onclick: () => move(-1), "aria-label": "earlier step" }, "◀"), slider,
      el("button", { type: "button", disabled: at < 0 || at === steps.length - 1, onclick: () => move(1), "aria-label": "later step" }, "▶"),
      el("b", { class: "step" }, view.step === null ? "all steps" : `step ${view.step.toLocaleString("en")}`),
      el("label", {}, all, " all"),
      el("span", { class: "break" }),
      field("text", "search text", "search"),
      el("span", { class: "range" }, "reward ", field("low", "min"), "–", field("high", "max")),
      el("span", { class: "range" }, "tokens ", field("short", "min"), "–", field("long", "max")),
      pick("flag", { "": "all responses", truncated: "truncated", failed: "failed", left_out: "filtered out", mixed: "mixed groups" }, "which"),
      pick("order", { given: "in order", best: "best first", worst: "worst first", mixed: "most mixed first", long: "longest first" }, "order"),
      traced ? pick("shade", SHADES, "shading of tokens") : null),
    view.source === null ? null : el("p", { class: "banner" }, "One prompt across steps: ", el("b", {}, visible(view.source)), " ", el("button", { type: "button", onclick: () => {
      view.source = null;
      set("step", steps[steps.length - 1]);
    } }, "back to all prompts")),
  ].filter(Boolean);
}

function matching(group) {
  const word = view.text.toLowerCase();
  const inPrompt = word && `${group.prompt} ${group.label || ""} ${group.source}`.toLowerCase().includes(word);
  return group.responses.filter((response) => {
    const value = worth(response);
    if (view.low !== "" && !(value >= Number(view.low))) return false;
    if (view.high !== "" && !(value <= Number(view.high))) return false;
    if (view.short !== "" && !(response.tokens >= Number(view.short))) return false;
    if (view.long !== "" && !(response.tokens <= Number(view.long))) return false;
    if (view.flag === "truncated" && response.finish !== "length") return false;
    if (view.flag === "failed" && !response.failure) return false;
    if (view.flag === "left_out" && !group.left_out) return false;
    if (view.flag === "mixed" && !(spread(group) > 0)) return false;
    return !word || inPrompt || said(response).toLowerCase().includes(word);
  });
}

const said = (response) => `${response.text || ""} ${response.problem || ""} ${(response.messages || []).map((m) => m.text || "").join(" ")}`;

function spread(group) {
  const values = group.responses.map(worth).filter((v) => v !== undefined && v !== null);
  return values.length ? Math.max(...values) - Math.min(...values) : 0;
}

const ORDERS = {
  best: (a, b) => worthOf(b) - worthOf(a),
  worst: (a, b) => worthOf(a) - worthOf(b),
  mixed: (a, b) => spread(b) - spread(a),
  long: (a, b) => Math.max(...b.responses.map((r) => r.tokens || 0)) - Math.max(...a.responses.map((r) => r.tokens || 0)),
};

function drawGroups(run, body, redraw) {
  let groups = run.groups.filter((g) => g.set === view.set && (view.source === null ? view.step === null || g.step === view.step : g.source === view.source));
  const total = groups.length;
  let found = groups.map((group) => ({ group, responses: matching(group) })).filter(({ responses }) => responses.length);
  if (view.source === null && ORDERS[view.order]) found = found.sort((a, b) => ORDERS[view.order](a.group, b.group));
  const shown = found.slice(0, view.count);
  const responses = found.reduce((sum, f) => sum + f.responses.length, 0);
  body.replaceChildren(
    el("p", { class: "muted count" }, `${found.length.toLocaleString("en")} of ${total.toLocaleString("en")} prompts, ${responses.toLocaleString("en")} responses`),
    ...shown.map(({ group, responses: some }) => groupCard(run, group, some, redraw)),
    found.length > shown.length ? el("button", { type: "button", class: "more", onclick: () => {
      view.count += PAGE;
      drawGroups(run, body, redraw);
    } }, `show more (${(found.length - shown.length).toLocaleString("en")} left)`) : "",
    found.length ? "" : el("p", { class: "empty" }, "No response matches these filters."),
  );
}

function groupCard(run, group, responses, redraw) {
  const across = new Set(run.groups.filter((g) => g.set === group.set && g.source === group.source).map((g) => g.step)).size;
  const metadata = Object.entries(group.metadata || {});
  return el("article", { class: "card group-card" },
    el("div", { class: "meta" },
      el("span", {}, visible(group.source)), el("span", {}, `step ${group.step.toLocaleString("en")}`),
      el("span", {}, `mean reward ${number(worthOf(group))}`),
      group.left_out ? el("span", { class: "pill" }, "filtered out") : null,
      across > 1 && view.source === null ? el("button", { type: "button", class: "link", onclick: () => {
        view.source = group.source;
        view.count = PAGE * 4;
        redraw();
      } }, `this prompt at ${across} steps`) : null),
    el("div", { class: "question" },
      group.images.length ? el("div", { class: "pictures" }, group.images.map((hash) => picture(run, hash))) : null,
      el("div", { class: "texts" }, promptText(group.prompt, "full"),
        group.label === undefined || group.label === null ? null : el("p", {}, "expected: ", el("b", {}, visible(group.label))),
        metadata.length ? el("p", { class: "muted small" }, metadata.map(([name, value]) => `${visible(name)}: ${visible(value)}`).join(" · ")) : null)),
    el("div", { class: "responses" }, responses.map((response) => responseCard(run, response))),
    responses.length < group.responses.length ? el("p", { class: "muted small" }, `${group.responses.length - responses.length} more responses do not match the filters`) : null,
    group.more ? el("p", { class: "muted small" }, `${group.more} more responses are not in this page`) : null);
}

function responseCard(run, response) {
  const parts = Object.entries(response.parts || {});
  const hasShade = view.shade !== "none" && response.trace && shadeValues(response.trace, view.shade);
  const chips = [
    rewardPill(response),
    ...parts.map(([name, value]) => el("span", { class: "chip", title: "score of this reward source" }, `${visible(name)} ${number(value)}`)),
    response.advantage === undefined ? null : el("span", { class: "chip", title: "mean advantage of its tokens" }, `adv ${response.advantage > 0 ? "+" : ""}${number(response.advantage)}`),
    response.teacher_gap === undefined ? null : el("span", { class: "chip", title: "mean log-prob of the teacher minus the policy's" }, `teacher ${number(response.teacher_gap)}`),
    el("span", { class: "chip" }, `${number(response.tokens || 0)} tokens`),
    response.finish === "length" ? el("span", { class: "chip bad" }, "truncated") : null,
    response.stop ? el("span", { class: "chip" }, `stop: ${visible(response.stop)}`) : null,
  ];
  const value = worth(response);
  return el("div", { class: `response ${response.failure ? "failed" : value > 0 ? "good" : value < 0 ? "bad" : ""}` },
    el("div", { class: "chips" }, chips),
    response.problem ? el("p", { class: "problem" }, visible(response.problem)) : null,
    response.messages ? conversation(run, response.messages) : null,
    hasShade ? shadedTokens(response.trace, view.shade) : response.messages ? null : responseText(response.text));
}
