// Settings, parameters, placement and versions of a run.

function settingsTab(run) {
  const filter = el("input", { type: "search", placeholder: "filter settings", "aria-label": "filter settings" });
  const body = el("div");
  const draw = () => {
    const word = filter.value.toLowerCase();
    const rows = run.settings.filter((s) => !word || `${s.name} ${s.value}`.toLowerCase().includes(word));
    body.replaceChildren(
      settingsTable("Different from the defaults", rows.filter((s) => s.changed), true),
      settingsTable("Defaults", rows.filter((s) => !s.changed), false),
    );
  };
  filter.oninput = later(draw);
  draw();
  const facts = run.facts || {};
  return [
    card("Settings", run.settings.length ? filter : el("p", { class: "muted" }, "The folder holds no settings."), body),
    run.parameters.length ? card("Parameters", parametersTable(run.parameters)) : null,
    Array.isArray(facts.placement) ? card("Placement", rowsTable(["role", "workers", facts.unit || "devices"], facts.placement)) : null,
    facts.versions ? card("Versions", rowsTable(["package", "version"], Object.entries(facts.versions))) : null,
  ];
}

function settingsTable(title, rows, showsDefault) {
  if (!rows.length) return el("span");
  const head = ["setting", "value", ...(showsDefault ? ["default"] : [])];
  const cells = rows.map((s) => [s.name, s.value, ...(showsDefault ? [s.default === null ? "" : s.default] : [])]);
  return el("div", {}, el("h3", {}, title), rowsTable(head, cells));
}

function parametersTable(rows) {
  const sum = (index) => rows.reduce((total, row) => total + row[index], 0);
  const cells = rows.map(([part, trainable, total]) => [part, trainable.toLocaleString("en"), total.toLocaleString("en")]);
  return rowsTable(["part", "trainable", "all"], [...cells, ["all", sum(1).toLocaleString("en"), sum(2).toLocaleString("en")]], "numbers");
}

function rowsTable(head, rows, kind = "") {
  return el("div", { class: "scroll" }, el("table", { class: kind },
    el("thead", {}, el("tr", {}, head.map((name) => el("th", {}, name)))),
    el("tbody", {}, rows.map((row) => el("tr", {}, row.map((cell) => el("td", {}, visible(cell === null ? "" : cell))))))));
}
