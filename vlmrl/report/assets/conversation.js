// Prompts, responses and conversations: text of models and data, always as text.

const SPECIAL = /(<\|[\w-]{1,40}\|>)/;
const TOOLS = /(<tool_call>[\s\S]*?(?:<\/tool_call>|$)|<tool_response>[\s\S]*?(?:<\/tool_response>|$)|<think>[\s\S]*?(?:<\/think>|$))/;

/** Text with control tokens such as <|im_start|> set apart. */
function withTokens(text) {
  return visible(text).split(SPECIAL).filter((part) => part).map((part) => (SPECIAL.test(part) ? el("span", { class: "token" }, part) : part));
}

/** The question within a rendered prompt: control tokens and the roles of an empty turn are left out if `kind` is short. */
function promptText(text, kind) {
  if (kind !== "short") return el("div", { class: "text prompt" }, withTokens(text));
  const turns = text.split("<|im_start|>").filter((turn) => turn.startsWith("user"));
  const last = turns.length ? turns[turns.length - 1].replace(/^user\n?/, "") : text;
  const plain = last.replace(/<\|[\w-]+\|>/g, "").trim();
  return el("div", { class: "text prompt" }, visible(plain.length > 500 ? `${plain.slice(0, 500)}…` : plain));
}

/** A response's text; tool calls and thoughts are blocks of their own. */
function responseText(text) {
  if (!text) return el("div", { class: "text" }, el("i", { class: "muted" }, "no text"));
  const parts = visible(text).split(TOOLS).filter((part) => part);
  return el("div", { class: "text" }, parts.map((part) => (TOOLS.test(part) ? el("span", { class: `block ${part.startsWith("<think>") ? "think" : "tool"}` }, part) : part)));
}

function conversation(run, messages) {
  return el("ol", { class: "turns" }, messages.map((message) => {
    const images = [...(message.images || [])];
    const parts = (message.text || "").split("<image>");
    // As many placeholders as images: they stand where the images were. Otherwise the text itself says <image>.
    const isPlaced = parts.length - 1 === images.length;
    const body = isPlaced ? parts.flatMap((part, i) => [part ? responseText(part) : null, i < images.length ? picture(run, images[i]) : null]) : [responseText(message.text || ""), images.map((hash) => picture(run, hash))];
    const reward = message.reward === undefined ? null : el("span", { class: "pill" }, `reward ${number(message.reward)}`);
    return el("li", { class: `turn ${["assistant", "tool", "user", "system"].includes(message.role) ? message.role : ""}` }, el("div", { class: "muted small" }, visible(message.role), " ", reward), body);
  }));
}

const worth = (response) => (response.reward !== undefined ? response.reward : response.score);

function worthOf(group) {
  const values = group.responses.map(worth).filter((value) => value !== undefined && value !== null);
  return values.length ? values.reduce((a, b) => a + b, 0) / values.length : 0;
}

function rewardPill(response) {
  const value = worth(response);
  if (response.failure) return el("span", { class: "pill bad" }, "failed");
  if (value === undefined || value === null) return el("span", { class: "pill" }, "no reward");
  return el("span", { class: `pill ${value > 0 ? "good" : value < 0 ? "bad" : "same"}` }, number(value));
}

const SHADES = {
  none: "no shading",
  logprob: "log-prob",
  gap: "engine − trainer",
  advantage: "advantage",
  kl: "KL to the reference",
};

/** The values of a shade for each token; null if the trace lacks them. */
function shadeValues(trace, shade) {
  const minus = (a, b) => (a && b ? a.map((value, i) => (value === null || b[i] === null ? null : value - b[i])) : null);
  if (shade === "gap") return minus(trace.logprob, trace.trainer);
  if (shade === "kl") return minus(trace.trainer || trace.logprob, trace.reference);
  return trace[shade] || null;
}

/** The tokens of a response, each with a background by its value. */
function shadedTokens(trace, shade) {
  const values = shadeValues(trace, shade) || [];
  const known = values.filter((value) => value !== null);
  // Differences of rounding are no more than noise, however they compare with each other.
  const largest = Math.max(...known.map(Math.abs), shade === "gap" ? 0.1 : 1e-12);
  return el("div", { class: "text tokens" }, trace.tokens.map((token, i) => {
    const value = values[i];
    const span = el("span", { title: tokenTitle(trace, i) }, visible(token));
    if (value !== null && value !== undefined) {
      const size = shade === "logprob" ? Math.min(-value / 6, 1) : Math.abs(value) / largest;
      const tone = shade === "logprob" || shade === "gap" ? "--orange" : value > 0 ? "--green" : "--red";
      span.style.background = `color-mix(in srgb, var(${tone}) ${Math.round(6 + size * 64) * (size > 0.005)}%, transparent)`;
    }
    return span;
  }));
}

function tokenTitle(trace, i) {
  const lines = [JSON.stringify(trace.tokens[i])];
  for (const [name, title] of [["logprob", "log-prob, engine"], ["trainer", "log-prob, trainer"], ["reference", "log-prob, reference"], ["advantage", "advantage"], ["value", "value"]]) {
    if (trace[name]) lines.push(`${title}: ${trace[name][i] === null ? "–" : trace[name][i]}`);
  }
  return lines.join("\n");
}
