// Charts: small ones in SVG, large ones by uPlot.

// A curve is [steps, values, lows, highs]. Of a long one the values are means of stretches of steps, and lows and highs
// their smallest and largest values; they are empty for a curve of all steps.

/** A line without axes: the shape of a curve. */
function sparkline(curve, stroke, width = 220, height = 56) {
  const [steps, values] = curve;
  const box = svg("svg", { viewBox: `0 0 ${width} ${height}`, class: "spark", preserveAspectRatio: "none", "aria-hidden": "true" });
  if (steps.length < 2) return box;
  const smooth = smoothed(values, steps.length > 40 ? 0.15 : 0);
  const low = Math.min(...smooth), high = Math.max(...smooth), first = steps[0], span = steps[steps.length - 1] - first || 1;
  const points = steps.map((step, i) => {
    const x = 3 + ((width - 6) * (step - first)) / span;
    const y = high === low ? height / 2 : height - 5 - ((height - 10) * (smooth[i] - low)) / (high - low);
    return `${x.toFixed(1)},${y.toFixed(1)}`;
  });
  const last = points[points.length - 1].split(",");
  const area = `3,${height} ${points.join(" ")} ${last[0]},${height}`;
  box.append(
    svg("polygon", { points: area, fill: stroke, opacity: "0.12" }),
    svg("polyline", { points: points.join(" "), fill: "none", stroke, "stroke-width": "2", "vector-effect": "non-scaling-stroke", "stroke-linejoin": "round" }),
  );
  return box;
}

/** The moving mean over a part of the curve, from 0 (none) to 1; the window is cut off at the ends. */
function smoothed(values, part) {
  const half = Math.floor((values.length * part) / 2);
  if (half < 1) return values;
  const sums = [0];
  for (const value of values) sums.push(sums[sums.length - 1] + value);
  return values.map((_, i) => {
    const from = Math.max(0, i - half), to = Math.min(values.length, i + half + 1);
    return (sums[to] - sums[from]) / (to - from);
  });
}

/** The range of the steps: uPlot never ends to place the ticks of a single step. */
function xRange(low, high) {
  if (low === null || high === null) return [0, 1];
  return low === high ? [low - 0.5, high + 0.5] : [low, high];
}

/** The range of an axis: a flat curve lies in the middle, and not at the bottom of 0 to 100. */
function yRange(low, high) {
  if (low === null || high === null) return [0, 1];
  if (low === high) return low === 0 ? [-1, 1] : [low - Math.abs(low) * 0.1, high + Math.abs(high) * 0.1];
  const margin = (high - low) * 0.08;
  return [low >= 0 && low - margin < 0 ? 0 : low - margin, high + margin];
}

const allCharts = new Set();
let zoom = null;
let isZooming = false;

/** Show the same steps in all charts. */
function zoomAll(range, except) {
  zoom = range;
  isZooming = true;
  for (const chart of allCharts) {
    if (chart === except) continue;
    const steps = chart.data[0];
    chart.setScale("x", range ? { min: range[0], max: range[1] } : { min: steps[0], max: steps[steps.length - 1] });
  }
  isZooming = false;
}

/** A chart of a metric. `lines` are {curve, name, color (a CSS variable)}; `options` are {smooth, log}.

Of each line one series, whose `line` is its number, has the figures that are read. */
function chart(target, lines, options) {
  const tables = [], series = [{ label: "step" }], bands = [];
  for (const [place, line] of lines.entries()) {
    const [steps, values, lows, highs] = line.curve;
    const smooth = smoothed(values, options.smooth);
    const stroke = () => color(line.color);
    const positive = (list) => (options.log ? list.map((v) => (v > 0 ? v : null)) : list);
    if (lows.length) {
      tables.push([steps, positive(highs), positive(lows)]);
      bands.push({ series: [series.length, series.length + 1], fill: stroke });
      for (const name of ["largest", "smallest"]) series.push({ label: `${line.name}, ${name}`, stroke, alpha: 0.18, width: 0.5, points: { show: false } });
    }
    if (options.smooth > 0) {
      tables.push([steps, positive(values), positive(smooth)]);
      series.push({ label: `${line.name} `, stroke, alpha: 0.25, width: 1, points: { show: false } });
    } else {
      tables.push([steps, positive(values)]);
    }
    series.push({ line: place, label: line.name, stroke, width: 1.8, points: { show: steps.length < 30, size: 5, fill: stroke } });
  }
  const axis = { stroke: () => color("--muted"), grid: { stroke: () => color("--line"), width: 1 }, ticks: { show: false }, font: "11px system-ui" };
  const short = (_, splits) => splits.map((value) => (value === null ? "" : number(value)));
  const plot = new uPlot(
    {
      width: Math.max(target.clientWidth, 120),
      height: options.height || 190,
      legend: { show: false },
      cursor: { sync: { key: "steps" }, y: false, drag: { x: true, y: false } },
      scales: { x: { time: false, range: (u, low, high) => xRange(low, high) }, y: options.log ? { distr: 3 } : { range: (u, low, high) => yRange(low, high) } },
      axes: [{ ...axis, size: 26, gap: 4, values: (_, splits) => splits.map((v) => (Number.isInteger(v) ? v.toLocaleString("en") : "")) }, { ...axis, size: 54, values: short }],
      series,
      bands,
      hooks: {
        setCursor: [(u) => options.onHover && options.onHover(u)],
        setScale: [(u, key) => {
          if (key !== "x" || isZooming || !allCharts.has(u)) return;
          const { min, max } = u.scales.x, steps = u.data[0];
          zoomAll(min <= steps[0] && max >= steps[steps.length - 1] ? null : [min, max], u);
        }],
      },
    },
    tables.length === 1 ? tables[0] : uPlot.join(tables),
    target,
  );
  if (zoom) {
    isZooming = true;
    plot.setScale("x", { min: zoom[0], max: zoom[1] });
    isZooming = false;
  }
  allCharts.add(plot);
  return plot;
}

function forgetCharts() {
  for (const plot of allCharts) plot.destroy();
  allCharts.clear();
}

window.addEventListener("resize", later(() => {
  for (const plot of allCharts) plot.setSize({ width: Math.max(plot.root.parentNode.clientWidth, 120), height: plot.height });
}));
