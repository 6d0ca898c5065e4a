// The page: asks for page/data every two seconds and draws it. What the fields mean is in kvstore/control/page/data.py.

import { bytes, count, el, meter, minutes, percent, plural, rate, seconds, sparkline, stack, table } from "./draw.js";

const EVERY_MS = 2000, PATIENCE_MS = 8000, TONES = ["var(--c0)", "var(--c1)", "var(--c2)", "var(--c3)"];
const at = (id) => document.getElementById(id);
const sum = (values) => values.reduce((a, b) => a + b, 0);
let data = null, heard = 0, timer = 0, asking = false;

// Colours: as the system says, or as chosen here.
const THEMES = ["auto", "light", "dark"];
function theme(name) {
  if (name === "auto") delete document.documentElement.dataset.theme; else document.documentElement.dataset.theme = name;
  at("theme").textContent = name;
  at("theme").setAttribute("aria-label", `Colours: ${name === "auto" ? "as the system says" : name}`);
}
const kept = (store, key) => { try { return store.getItem(key); } catch { return null; } };
const keep = (store, key, value) => { try { value === null ? store.removeItem(key) : store.setItem(key, value); } catch { /* private mode */ } };
at("theme").addEventListener("click", () => {
  const next = THEMES[(THEMES.indexOf(at("theme").textContent) + 1) % THEMES.length];
  keep(localStorage, "kvstore-theme", next);
  theme(next);
});
theme(THEMES.includes(kept(localStorage, "kvstore-theme")) ? kept(localStorage, "kvstore-theme") : "auto");

// Asking.
async function ask() {
  if (asking) return;
  clearTimeout(timer);
  asking = true;
  const token = kept(sessionStorage, "kvstore-token");
  try {
    const answer = await fetch("page/data", {
      headers: token ? { Authorization: `Bearer ${token}` } : {}, cache: "no-store", signal: AbortSignal.timeout(PATIENCE_MS),
    });
    if (answer.status === 401 || answer.status === 403) { wantToken(token !== null); return; }
    if (!answer.ok) throw new Error(`the daemon answered ${answer.status}`);
    data = await answer.json();
    heard = Date.now();
    at("login").hidden = true;
    at("main").hidden = false;
    at("metrics").hidden = token !== null; // a link bears no token
    document.body.classList.remove("stale");
    at("notice").hidden = !data.node.problems.length;
    at("notice").textContent = data.node.problems.join(" ");
    draw();
  } catch (error) {
    const since = heard ? ` What is shown is ${seconds((Date.now() - heard) / 1000)} old.` : "";
    at("notice").textContent = `No answer: ${error.name === "TimeoutError" ? "it took too long" : error.message}.${since}`;
    at("notice").hidden = false;
    document.body.classList.add("stale");
    pill("unreachable", "bad");
  } finally {
    asking = false;
    if (at("login").hidden && !document.hidden) timer = setTimeout(ask, EVERY_MS);
  }
}
function wantToken(wrong) {
  keep(sessionStorage, "kvstore-token", null);
  at("login-said").textContent = wrong ? "That is not the admin token." : "";
  at("notice").hidden = true;
  at("main").hidden = true;
  at("login").hidden = false;
  pill("token wanted", "warn");
  at("token").focus();
}
at("login").addEventListener("submit", (event) => {
  event.preventDefault();
  const token = at("token").value.trim();
  if (!/^[\x21-\x7e]+$/.test(token)) { at("login-said").textContent = "A token is letters, digits and signs, without blanks."; return; }
  keep(sessionStorage, "kvstore-token", token);
  at("token").value = "";
  at("login").hidden = true;
  ask();
});
document.addEventListener("visibilitychange", () => { if (!document.hidden && at("login").hidden) ask(); });
let resized = 0;
addEventListener("resize", () => { clearTimeout(resized); resized = setTimeout(() => data && charts(), 120); });
setInterval(() => { const age = (Date.now() - heard) / 1000; at("live").textContent = !heard ? "" : age < 5 ? "live" : `${seconds(Math.round(age))} ago`; }, 500);

// Drawing.
function pill(text, kind) { at("state").textContent = text; at("state").className = `pill ${kind}`; }
const toneOf = (name) => TONES[Math.max(data.tiers.findIndex((tier) => tier.name === name), 0) % TONES.length];

function draw() {
  const { node } = data;
  document.title = `${node.name} · kvstore`;
  at("node-name").textContent = [node.name, node.address || node.unix].filter(Boolean).join(" · ");
  pill(node.state, { ready: "good", draining: "warn", degraded: "warn" }[node.state] ?? "bad");
  at("about").textContent = `kvstore ${node.version}, up ${seconds(data.now - node.started)}`;
  for (const section of document.querySelectorAll(".of-hour")) section.hidden = data.hour === null; // a controller's page
  charts();
  tiers();
  served();
  operations();
  errors();
  nodes();
  spaces();
}

function kpi(id, big, small, values) {
  const [, number, text, spark] = at(id).children;
  number.textContent = big;
  text.textContent = small;
  sparkline(spark, values);
}

function charts() {
  if (data.hour === null) return;
  const { hour } = data, asked = sum(hour.asked), hits = sum(hour.hits), failed = sum(hour.errors), saved = sum(hour.saved_s);
  const rates = hour.asked.map((value, i) => (value ? hour.hits[i] / value : null));
  kpi("kpi-hit", asked ? percent(hits / asked) : "–", asked ? `${count(hits)} of ${plural(asked, "record")} found` : "nothing asked for yet", rates);
  kpi("kpi-saved", saved ? seconds(saved) : "–", saved ? "of computing, in the last hour" : "no engine has told", hour.saved_s);
  kpi("kpi-bytes", bytes(sum(hour.bytes)), "in the last hour", hour.bytes);
  kpi("kpi-errors", count(failed), failed ? "records, in the last hour" : "none in the last hour", hour.errors);
  at("kpi-errors").querySelector(".big").classList.toggle("bad-text", failed > 0);
  minutes(at("rate"), "line", rates, {
    start: hour.start, top: 1, format: (value) => `${Math.round(value * 100)} %`, tone: "var(--c0)", tip: at("rate-tip"),
    say: (i) => (rates[i] === null ? "nothing asked for" : `${percent(rates[i])} of ${plural(hour.asked[i], "record")}`),
    label: `Hit rate by minute; ${asked ? percent(hits / asked) : "nothing asked for"} over the hour`,
  });
  if (!saved) at("saved").replaceChildren(el("p", { class: "empty" }, "Engines count what they save; none has told this daemon."));
  else minutes(at("saved"), "bars", hour.saved_s, {
    start: hour.start, format: (value) => (value < 1e-5 ? "0" : seconds(value)), tone: "var(--c1)", tip: at("saved-tip"),
    say: (i) => `${seconds(hour.saved_s[i])} saved`, label: `Seconds of prefill saved by minute; ${seconds(saved)} over the hour`,
  });
}

function served() {
  const total = sum(data.tiers.map((tier) => tier.hits));
  if (!total) at("served").replaceChildren(el("p", { class: "empty" }, "No record has been read yet."));
  else stack(at("served"), data.tiers.map((tier) => ({ name: tier.name, value: tier.hits, tone: toneOf(tier.name), said: `${count(tier.hits)} (${percent(tier.hits / total)})` })), "Records read by tier");
}

// The vessels stay in the page and only change, so that what moves goes on moving.
let built = "";
function tiers() {
  const shape = data.tiers.map((tier) => tier.name).join("/");
  if (shape !== built) {
    built = shape;
    const parts = [el("div", { class: "tier engines", style: { "--tone": "var(--engine)" } }, el("div", { class: "name" }, el("b", {}, "Engines")),
      el("div", { class: "vessel" }, el("div", { class: "in" }, el("span", { id: "engines-at", class: "pct" }), el("span", { class: "small muted" }, "connections"))))];
    data.tiers.forEach((tier, i) => parts.push(
      el("div", { class: "flow", id: `flow-${i}`, style: { "--tone": TONES[i % TONES.length] } }, lane("up"), lane("down")),
      el("div", { class: "tier", id: `tier-${i}`, role: "group", style: { "--tone": TONES[i % TONES.length] } },
        el("div", { class: "name" }, el("b", {}, tier.name), el("span", { class: "small muted" })),
        el("div", { class: "vessel" }, el("div", { class: "fill" }), el("div", { class: "in" }, el("span", { class: "pct" }), el("span", { class: "small" }))),
        el("div", { class: "small muted" }))));
    at("tiers").replaceChildren(...parts);
  }
  at("engines-at").textContent = data.engines === null ? "–" : count(data.engines);
  data.tiers.forEach((tier, i) => {
    const node = at(`tier-${i}`), part = tier.capacity ? Math.min(tier.used / tier.capacity, 1) : null;
    node.classList.toggle("down", tier.state === "open");
    node.querySelector(".vessel").classList.toggle("open", part === null);
    node.querySelector(".fill").style.height = `${(part ?? 1) * 100}%`;
    node.querySelector(".pct").textContent = part === null ? held(tier) : percent(part);
    node.querySelector(".in .small").textContent = part === null ? (known(tier) ? "no limit known" : "not counted") : `${bytes(tier.used)} of ${bytes(tier.capacity)}`;
    node.querySelector(".name .small").textContent = tier.records < 0 ? "" : plural(tier.records, "record");
    node.lastChild.textContent = [tier.url.replace(/\?.*$/, ""), tier.pinned ? `${plural(tier.pinned, "record")} pinned` : "", tier.evicted ? `${count(tier.evicted)} evicted` : "", tier.state === "open" ? "down, left alone" : ""].filter(Boolean).join(" · ");
    node.setAttribute("aria-label", `${tier.name}: ${part === null ? held(tier) : `${percent(part)} full`}`);
    flow(at(`flow-${i}`).firstChild, tier.read_bytes_s);
    flow(at(`flow-${i}`).lastChild, tier.write_bytes_s);
  });
}
const known = (tier) => tier.records >= 0 || tier.used > 0;
const held = (tier) => (known(tier) ? bytes(tier.used) : "–");
const lane = (way) => el("div", { class: `lane ${way}` }, el("span", { class: "said" }), el("span", { class: "arrow", "aria-hidden": "true" }, el("span", { class: "pipe" }), el("span", { class: "tipmark" })));
function flow(node, value) {
  const on = value >= 1, size = on ? Math.max(0, Math.min(1, Math.log10(value / 1e4) / 5.5)) : 0; // 10 kB/s to 3 GB/s
  node.classList.toggle("on", on);
  node.firstChild.textContent = `${node.classList.contains("up") ? "read" : "write"} ${rate(value)}`;
  node.style.setProperty("--thick", `${Math.round(3 + 6 * size)}px`);
  node.style.setProperty("--pace", `${(2 - Math.round(size * 4) * 0.4).toFixed(1)}s`);
}

const span = () => `last ${seconds(Math.max(Math.round(data.window_s), 1))}`;

function operations() {
  const rows = data.operations, most = Math.max(...rows.map((row) => row.p99_s), 1e-9);
  at("ops-window").textContent = `by p99, ${span()}`;
  at("ops").replaceChildren(rows.length ? table([
    { title: "operation", cell: (row) => `${row.backend} ${row.operation}` },
    { title: "", wide: true, cell: (row) => meter(row.p99_s / most) },
    { title: "p50", num: true, cell: (row) => seconds(row.p50_s) },
    { title: "p99", num: true, cell: (row) => (row.p99_over ? `> ${seconds(row.p99_s)}` : seconds(row.p99_s)) },
    { title: "calls", num: true, cell: (row) => count(row.calls) },
    { title: "speed", num: true, wide: true, cell: (row) => (row.bytes_s ? `${bytes(row.bytes_s)}/s` : "–") },
  ], rows) : el("p", { class: "empty" }, "Nothing was done."));
}

function errors() {
  const kind = { closed: "good", "half-open": "warn", open: "bad" };
  at("breakers").replaceChildren(...data.breakers.map((breaker) => el("span", { class: `chip ${breaker.state === "closed" ? "" : kind[breaker.state]}` },
    el("i", { class: `dot ${kind[breaker.state]}` }), `${breaker.backend} ${breaker.side}: ${breaker.state}${breaker.refused ? `, ${count(breaker.refused)} refused` : ""}`)));
  at("errors-window").textContent = span();
  at("errors").replaceChildren(data.errors.length ? table([
    { title: "where", cell: (row) => [row.backend, row.operation].filter(Boolean).join(" ") },
    { title: "what", cell: (row) => row.error },
    { title: "records", num: true, cell: (row) => count(row.count) },
  ], data.errors) : el("p", { class: "empty" }, "No errors."));
}

function nodes() {
  const rows = data.nodes, shown = { ready: "good", draining: "warn", loading: "warn", lost: "bad" };
  at("nodes-note").textContent = rows.length > 1 ? `${plural(rows.length, "node")}; share: of all records known` : "this node; a controller shows all of them";
  const total = sum(rows.map((row) => Math.max(row.records, 0)));
  if (rows.length > 1 && total) stack(at("placement"), rows.map((row, i) => ({ name: row.name, value: Math.max(row.records, 0), tone: TONES[i % TONES.length], said: percent(Math.max(row.records, 0) / total) })), "Records by node");
  else at("placement").replaceChildren();
  at("nodes").replaceChildren(table([
    { title: "node", cell: (row) => el("span", {}, el("i", { class: `dot ${shown[row.state] ?? "warn"}` }), ` ${row.name}`, row.self ? el("span", { class: "muted" }, " (this one)") : null) },
    { title: "address", wide: true, cell: (row) => row.address || "–" },
    { title: "state", cell: (row) => (row.state === "lost" ? `not heard for ${seconds(row.heard_s)}` : row.state) },
    { title: "memory", num: true, cell: (row) => (row.used === null ? "–" : row.capacity ? `${bytes(row.used)} of ${bytes(row.capacity)}` : bytes(row.used)) },
    { title: "records", num: true, wide: true, cell: (row) => count(row.records) },
    { title: "load", num: true, cell: (row) => (row.load === null ? "–" : percent(row.load)) },
  ], rows), ...more(data.more_nodes, "node"));
}
const more = (number, noun) => (number ? [el("p", { class: "muted small" }, `and ${plural(number, `more ${noun}`)}, which kvstore ctl shows`)] : []);

function spaces() {
  at("spaces-card").hidden = data.namespaces.length < 2;
  const names = data.tiers.map((tier) => tier.name);
  at("spaces").replaceChildren(table([
    { title: "namespace", cell: (row) => row.name || "default" },
    ...names.map((name) => ({ title: name, num: true, cell: ({ tiers: { [name]: tier } }) => (tier ? `${held(tier)}${tier.capacity ? ` of ${bytes(tier.capacity)}` : ""}` : "–") })),
  ], data.namespaces), ...more(data.more_namespaces, "namespace"));
}

ask();
