"use strict";
// Asks for /status each second and shows it. Reads only, but for the chat. Texts come in by textContent alone.
const WINDOW_S = 10, LOOK_MS = 1000, GONE_MS = 60000, SHOWN_REQUESTS = 12;
const STATES = ["free", "granted", "owned", "cached", "quarantined"];
const PARTS = ["queue", "reserve", "dispatch", "prefill_queue", "prefill", "relay", "rest"];
const at = (id) => document.getElementById(id);
let key = "", model = "", lastOk = 0, shown = "";
const history = [], seen = new Map(), gone = new Map();

function make(name, text, className) {
  const made = document.createElement(name);
  if (text !== undefined) made.textContent = text;
  if (className) made.className = className;
  return made;
}
function row(cells) {
  const made = make("tr");
  cells.forEach((cell, place) => {
    const box = make(place ? "td" : "th");
    if (!place) box.scope = "row";
    box.append(cell);
    made.append(box);
  });
  return made;
}
const ms = (s) => s === null ? "–" : s === Infinity ? "> all" : (s * 1000).toFixed(s < 0.1 ? 1 : 0);
const count = (n) => n.toLocaleString("en");

async function ask(path, options = {}) {
  const headers = key ? { authorization: `Bearer ${key}` } : {};
  return fetch(path, { cache: "no-store", ...options, headers: { ...headers, ...options.headers } });
}
async function reasonOf(answer) {
  try { return (await answer.json()).error.message; } catch { return `status ${answer.status}`; }
}

function percentile(now, then, percent) {
  const counts = now.counts.map((n, i) => n - ((then.counts || [])[i] || 0));
  const total = counts.reduce((a, b) => a + b, 0);
  if (total <= 0) return null;
  const rank = total * percent / 100;
  let below = 0;
  for (let i = 0; i < counts.length; i++) {
    if (counts[i] > 0 && below + counts[i] >= rank) {
      if (i >= now.bounds_s.length) return Infinity;
      const low = i ? now.bounds_s[i - 1] : 0;
      return low + (now.bounds_s[i] - low) * Math.max(0, rank - below) / counts[i];
    }
    below += counts[i];
  }
  return null;
}

function showLoad(status) {
  const now = status.figures;
  if (history.length && now.at_s < history[history.length - 1].at_s) history.length = 0; // another router, or begun anew
  history.push(now);
  while (history.length > 2 && now.at_s - history[1].at_s > WINDOW_S) history.shift();
  const then = history[0], span = now.at_s - then.at_s;
  const rate = (name) => span > 0 ? ((now[name] - then[name]) / span).toFixed(1) : "–";
  const told = [
    ["running", count(status.queue.num_running)],
    ["in the queue", `${count(status.queue.num_waiting)} of ${count(status.queue.limit)}`],
    ["tokens waiting", count(status.queue.num_waiting_tokens)],
    ["requests/s", rate("num_requests_ended")],
    ["tokens/s", rate("num_completion_tokens")],
    ["prompt tokens/s", rate("num_prompt_tokens")],
    ["failed", count(now.num_requests_failed)],
    ["refused", count(now.num_requests_refused)],
  ];
  at("load").replaceChildren(...told.map(([name, value]) => {
    const box = make("div");
    box.append(make("dt", name), make("dd", value));
    return box;
  }));
  const times = [["first token", "ttft"], ["gap between tokens", "gap"], ["queue", "queued"]];
  at("times").tBodies[0].replaceChildren(...times.map(([name, field]) =>
    row([name, ...[50, 90, 99].map((percent) => ms(percentile(now[field], then[field], percent)))])));
}

function blocks(counts) {
  const box = make("div"), bar = make("div", undefined, "bar");
  const total = STATES.reduce((sum, state) => sum + counts[state], 0) || 1;
  for (const state of STATES) {
    const part = make("span", undefined, state);
    part.style.width = `${100 * counts[state] / total}%`;
    bar.append(part);
  }
  bar.setAttribute("aria-hidden", "true");
  box.append(bar, make("span", `blocks: ${STATES.map((state) => `${state} ${count(counts[state])}`).join(", ")}`, "counts"));
  return box;
}
function showWorkers(status) {
  const now = Date.now(), here = new Set(status.workers.map((worker) => worker.id));
  for (const [id, worker] of seen) if (!here.has(id) && !gone.has(id)) gone.set(id, [now, worker]);
  for (const [id, [since]] of gone) if (here.has(id) || now - since > GONE_MS) { gone.delete(id); seen.delete(id); }
  const workers = [...status.workers].sort((one, other) => one.id < other.id ? -1 : 1);
  const rows = workers.flatMap((worker) => {
    seen.set(worker.id, worker);
    const state = make("span", worker.state, worker.state === "up" ? "" : "bad");
    const below = make("tr", undefined, "below"), cell = make("td");
    cell.colSpan = 6;
    cell.append(blocks(worker.blocks));
    below.append(cell);
    return [row([worker.id, worker.role, state, count(worker.num_running), count(worker.num_waiting),
      worker.step_s ? ms(worker.step_s) : "–"]), below];
  });
  for (const [id, [since, worker]] of gone) {
    const told = make("span", `gone for ${Math.round((now - since) / 1000)} s`, "bad");
    rows.push(row([id, worker.role, told, "–", "–", "–"]));
  }
  if (!rows.length) rows.push(row([make("span", "no worker is here", "bad"), "", "", "", "", ""]));
  at("workers").tBodies[0].replaceChildren(...rows);
  at("pairs").replaceChildren(...status.pairs.map((pair) => {
    const text = `${pair.prefill_worker} → ${pair.decode_worker}: `;
    const item = make("li", text);
    item.append(make("span", pair.up ? `up over ${pair.transport}` : `down: ${pair.reason}`, pair.up ? "" : "bad"));
    return item;
  }));
}

function parts(timings) { // a bar and the same in words
  const box = make("div", undefined, "ttft"), bar = make("div", undefined, "bar");
  const known = PARTS.map((name) => [name, Math.max(0, timings[`${name}_ms`])]);
  const total = known.reduce((sum, part) => sum + part[1], 0) || 1;
  for (const [name, value] of known) {
    const part = make("span", undefined, name);
    part.style.width = `${100 * value / total}%`;
    bar.append(part);
  }
  bar.setAttribute("aria-hidden", "true");
  const told = known.map(([name, value]) => `${name.replace("_", " ")} ${value.toFixed(1)}`).join(" + ");
  box.append(bar, make("span", `first token: ${told} = ${timings.ttft_ms.toFixed(1)} ms`, "counts"));
  return box;
}
function showRequests(status) {
  const last = status.placements.slice(-SHOWN_REQUESTS).reverse();
  at("no-requests").hidden = last.length > 0;
  const name = (each) => `${each.request_id}/${each.choice}/${each.attempt}`;
  const fresh = last.map((each) => name(each) + (each.attempt ? !!each.timings : each.age_s)).join(" ");
  if (fresh === shown) return; // else whoever reads one would lose the place
  shown = fresh;
  const open = new Set([...at("requests").querySelectorAll("details[open]")].map((each) => each.dataset.name));
  const focused = document.activeElement && document.activeElement.parentElement;
  const focus = focused && focused.dataset ? focused.dataset.name : undefined;
  at("requests").replaceChildren(...last.map((each) => {
    const box = make("details");
    box.dataset.name = name(each);
    box.open = open.has(box.dataset.name);
    const chosen = each.candidates.find((candidate) => candidate.chosen);
    const where = chosen ? (chosen.prefill_worker ? `${chosen.prefill_worker} → ` : "") + chosen.decode_worker : "waits";
    const attempt = each.attempt > 1 ? `, attempt ${each.attempt}` : "";
    const first = each.timings ? `, first token after ${each.timings.ttft_ms.toFixed(1)} ms` : "";
    box.append(make("summary", `${each.request_id}: ${where}${attempt}${first}`));
    if (each.timings) box.append(parts(each.timings));
    const table = make("table"), body = make("tbody");
    body.append(...each.candidates.map((candidate) => row([
      (candidate.prefill_worker ? `${candidate.prefill_worker} → ` : "") + candidate.decode_worker,
      candidate.cost.length ? `${candidate.cost.reduce((sum, part) => sum + part[1], 0).toFixed(1)} ms` : "",
      candidate.chosen ? "chosen" : candidate.reason,
      candidate.cost.filter((part) => part[1]).map((part) => `${part[0]} ${part[1].toFixed(1)}`).join(" + "),
    ])));
    table.append(make("caption", "Pairs that were weighed, and their costs in ms"), body);
    box.append(table);
    return box;
  }));
  if (focus) for (const each of at("requests").children) if (each.dataset.name === focus) each.firstChild.focus();
}

function tell(text, isBad) {
  if (at("state").textContent !== text) at("state").textContent = text;
  at("state").className = isBad ? "lost" : "";
}
async function look() {
  try {
    const answer = await ask("/status");
    if (answer.status === 401 || answer.status === 403) {
      at("key-form").hidden = false;
      tell(key ? await reasonOf(answer) : "This server wants an API key.", true);
      return;
    }
    if (!answer.ok) throw new Error(await reasonOf(answer));
    const status = await answer.json();
    at("key-form").hidden = true;
    lastOk = Date.now();
    showLoad(status);
    showWorkers(status);
    showRequests(status);
    const num = status.workers.length;
    tell(`${status.router_id}: ${status.draining ? "draining, " : ""}${num} ${num === 1 ? "worker" : "workers"}`, status.draining || !num);
    if (!model) await lookForModel();
  } catch (error) {
    const since = lastOk ? ` since ${Math.round((Date.now() - lastOk) / 1000)} s` : "";
    tell(`No answer${since}: ${error.message}`, true);
  }
}
async function lookForModel() {
  const answer = await ask("/v1/models");
  if (!answer.ok) return;
  model = (await answer.json()).data[0].id;
  at("model").textContent = model;
}
async function watch() {
  for (;;) {
    if (!document.hidden) await look();
    await new Promise((resolve) => setTimeout(resolve, LOOK_MS));
  }
}

const messages = [];
let stopping = null;
function say(who, text) {
  const box = make("p"), body = make("span", text);
  box.append(make("b", who), body);
  at("said").append(box);
  at("said").scrollTop = at("said").scrollHeight;
  return body;
}
async function* eventsOf(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) if (line.startsWith("data: ") && line !== "data: [DONE]") yield JSON.parse(line.slice(6));
  }
}
async function send(text) {
  messages.push({ role: "user", content: text });
  say("You", text);
  const body = say(model || "Model", "");
  stopping = new AbortController();
  at("send").disabled = true;
  at("stop").disabled = false;
  let said = "";
  try {
    const answer = await ask("/v1/chat/completions", {
      method: "POST", signal: stopping.signal, headers: { "content-type": "application/json" },
      body: JSON.stringify({ messages, stream: true, return_timings: true }),
    });
    if (!answer.ok) throw new Error(await reasonOf(answer));
    for await (const event of eventsOf(answer)) {
      if (event.error) throw new Error(event.error.message);
      if (event.timings) showParts(event.timings);
      const delta = event.choices.length ? event.choices[0].delta : {};
      said += delta.content || "";
      body.textContent += (delta.reasoning_content || "") + (delta.content || "");
      at("said").scrollTop = at("said").scrollHeight;
    }
  } catch (error) {
    body.textContent += error.name === "AbortError" ? " (stopped)" : ` (${error.message})`;
    if (error.name !== "AbortError") body.className = "bad";
  }
  messages.push({ role: "assistant", content: said });
  at("send").disabled = false;
  at("stop").disabled = true;
}
function showParts(timings) {
  at("parts").hidden = false;
  const rows = PARTS.map((name) => row([name.replace("_", " "), `${timings[`${name}_ms`].toFixed(1)} ms`]));
  rows.push(row(["first token", `${timings.ttft_ms.toFixed(1)} ms`]),
    row(["gap, p50 and p99", `${timings.itl_p50_ms.toFixed(1)} and ${timings.itl_p99_ms.toFixed(1)} ms`]));
  at("parts").querySelector("tbody").replaceChildren(...rows);
}
at("chat-form").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = at("text").value.trim();
  if (!text || at("send").disabled) return;
  at("text").value = "";
  send(text);
});
at("text").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); at("chat-form").requestSubmit(); }
});
at("stop").addEventListener("click", () => stopping && stopping.abort());
at("clear").addEventListener("click", () => {
  if (stopping) stopping.abort();
  messages.length = 0;
  at("said").replaceChildren();
  at("text").focus();
});
at("key-form").addEventListener("submit", (event) => { event.preventDefault(); key = at("key").value.trim(); look(); });
watch();
