// One head: the tokens, what a query attends to exactly, and what each plan keeps of that.
const sample = data.sample;
let tensors = null;

// The file of the sample is safetensors: the length of a header, the header, and the numbers.
async function unpack() {
  const packed = Uint8Array.from(atob($("sample").textContent), (c) => c.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
  const file = await new Response(stream).arrayBuffer();
  const size = Number(new DataView(file).getBigUint64(0, true));
  const header = JSON.parse(new TextDecoder().decode(new Uint8Array(file, 8, size)));
  const kinds = { I16: Int16Array, U8: Uint8Array, F32: Float32Array };
  const read = {};
  for (const [name, { dtype, shape, data_offsets }] of Object.entries(header)) {
    if (name === "__metadata__") continue;
    read[name] = { shape, flat: new kinds[dtype](file.slice(8 + size + data_offsets[0], 8 + size + data_offsets[1])) };
  }
  return read;
}
// The last dimension at the first indices, null where there is no such tensor.
function at(name, ...where) {
  const tensor = tensors[name];
  if (!tensor) return null;
  const start = where.reduce((sum, index, axis) => sum * tensor.shape[axis] + index, 0);
  const size = tensor.shape.slice(where.length).reduce((a, b) => a * b, 1);
  return tensor.flat.subarray(start * size, (start + 1) * size);
}

// What a plan does with the query that is shown: kept keys, stand-ins with weight and members, weights, error.
function view(plan) {
  const { layer, head, query } = state;
  const exact = Array.from(at("exact", layer, head, query), (w) => w / sample.unit);
  const bits = at(`${plan}.kept`, layer, head, query);
  const kept = exact.map((_, j) => (bits[j >> 3] >> (j & 7)) & 1);
  const weight = Array.from(at(`${plan}.weight`, layer, head, query) ?? [], (w) => w / sample.unit);
  const label = at(`${plan}.label`, layer, head);
  const whose = exact.map((w, j) => (kept[j] || !weight.length ? -1 : label ? label[j] : w > 0 || j <= sample.queries[query] ? 0 : -1));
  const mass = exact.reduce((sum, w, j) => sum + w * kept[j], 0);
  const left = 1 - weight.reduce((a, b) => a + b, 0);
  const planned = exact.map((w, j) => (kept[j] && mass > 0 ? (w * left) / mass : 0));
  const standing = weight.map((w, c) => {
    const keys = whose.flatMap((of, j) => (of === c ? [j] : []));
    return { c, weight: w, keys, exact: keys.reduce((sum, j) => sum + exact[j], 0) };
  }).filter((one) => one.keys.length);
  return { exact, kept, whose, planned, mass, standing, left, error: at(`${plan}.error`, layer, head)[query] };
}

const bytes = sample && sample.tokens.some((token) => /^[Ġ▁]/.test(token));
const word = (j) => (sample.tokens.length ? sample.tokens[j].replace(/^[Ġ▁]|^##/, "") || "␣" : String(j));
const joined = (j) => sample.tokens.length > 0 && (bytes ? !/^[Ġ▁]/.test(sample.tokens[j]) : sample.tokens[j].startsWith("##"));
const place = (j) => `${word(j)} (${j})`;

function panel(side) {
  const plan = state.plans[side];
  const seen = view(plan);
  const most = Math.max(...seen.exact);
  const asked = sample.queries[state.query];
  const spans = seen.exact.map((w, j) => make("span", {
    class: [seen.kept[j] && "kept", j === asked && "asked"].filter(Boolean).join(" ") || false,
    style: `--w:${Math.sqrt(w / most).toFixed(3)}`,
    title: `${place(j)}: exact weight ${w.toFixed(4)}, in this plan: ${fate(seen, j)}`,
  }, word(j)));
  const buttons = seen.standing.sort((a, b) => b.weight - a.weight).slice(0, 12).map((one) => {
    const text = `${one.c}: ${one.keys.length === 1 ? "1 key" : `${one.keys.length} keys`}, weight ${one.weight.toFixed(3)}, exact ${one.exact.toFixed(3)}`;
    const button = make("button", { type: "button", "aria-pressed": false, onclick: () => {
      const on = button.getAttribute("aria-pressed") !== "true";
      buttons.forEach((other) => other.setAttribute("aria-pressed", on && other === button));
      spans.forEach((span, j) => span.classList.toggle("lit", on && one.keys.includes(j)));
    } }, text);
    return button;
  });
  const kept = seen.kept.reduce((a, b) => a + b, 0);
  return { seen, node: make("div", {},
    make("h3", {}, `Plan ${"AB"[side]}: ${label(rows[plan])}`),
    make("p", { class: "facts" }, `The error of this query is ${seen.error.toFixed(3)}. The plan keeps ${kept} keys, which have ${(100 * seen.mass).toFixed(1)} % of the exact weight. `
      + (seen.standing.length ? `Stand-ins for the other keys get ${(100 * (1 - seen.left)).toFixed(1)} % of the plan's weight.` : "It drops the other keys.")),
    make("div", { class: "tokens", role: "img", tabindex: 0,
      "aria-label": `The tokens, darker where the query ${place(asked)} attends to them exactly; the same is in the table below.` },
      ...spans.flatMap((span, j) => (j && !joined(j) ? [" ", span] : [span]))),
    buttons.length ? make("p", { class: "quiet" }, "Stand-ins by weight: how many keys each replaces, its weight, and the exact weight of those keys. Press one to mark its keys.") : "",
    make("div", { class: "stand" }, ...buttons)) };
}
function fate(seen, j) {
  if (seen.kept[j]) return seen.planned[j].toFixed(4);
  return seen.whose[j] >= 0 ? `stand-in ${seen.whose[j]}` : "dropped";
}

function drawHead() {
  const { layer, head } = state;
  $("head-says").textContent = `Layer ${layer}, head ${head}: error `
    + state.plans.map((plan, side) => `${rows[plan].heads[layer][head].toFixed(3)} under plan ${"AB"[side]} (${label(rows[plan])})`).join(", ") + ".";
  if (!tensors) {
    $("look").replaceChildren(make("p", { class: "quiet" }, sample ? "Reading the sample …"
      : "These results come without a sample of queries. fewkeys compare --out DIR writes one beside results.json."));
    return;
  }
  const select = make("select", { id: "query", onchange: () => { change({ query: Number(select.value) }); $("query").focus(); } },
    ...sample.queries.map((position, i) => make("option", { value: i, selected: i === state.query }, place(position))));
  const [a, b] = [panel(0), panel(1)];
  const top = a.seen.exact.map((w, j) => [w, j]).sort((x, y) => y[0] - x[0]).slice(0, 20);
  $("look").replaceChildren(
    make("div", { class: "choice" }, make("label", { for: "query" }, "Query (its position)"), select,
      make("span", { class: "key quiet" }, make("span", { style: "background:var(--weight);color:#000" }, "exact weight"),
        make("span", { style: "border-bottom-color:var(--accent)" }, "kept key"), make("span", { style: "outline:2px solid var(--text)" }, "the query"))),
    make("div", { class: "pair" }, a.node, b.node),
    make("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Table of the heaviest keys, scrolls sideways" },
      make("table", { id: "keys" }, make("caption", {}, `The ${top.length} keys with the largest exact weights: the weight that a plan gives a kept key, the stand-in of another one, or "dropped"`),
        make("thead", {}, make("tr", {}, ...["key (position)", "exact", "plan A", "plan B"].map((name) => make("th", { scope: "col" }, name)))),
        make("tbody", {}, ...top.map(([w, j]) => make("tr", {}, make("th", { scope: "row" }, place(j)),
          make("td", {}, w.toFixed(4)), make("td", {}, fate(a.seen, j)), make("td", {}, fate(b.seen, j))))))));
  for (const box of $("look").querySelectorAll(".tokens")) {
    const asked = box.querySelector(".asked");
    if (asked) box.scrollTop = asked.offsetTop - box.clientHeight / 2;
  }
}
listeners.push((what) => { if (["plans", "layer", "head", "query"].some((name) => what.includes(name))) drawHead(); });
drawHead();
// Where the page opens: the head and the query with the most keys of at least a hundredth of the exact weight that plan A
// keeps.
function firstView() {
  let most = { count: -1 };
  for (let layer = 0; layer < data.layers; layer++) for (let head = 0; head < data.heads; head++) sample.queries.forEach((_, query) => {
    const [exact, bits] = [at("exact", layer, head, query), at(`${state.plans[0]}.kept`, layer, head, query)];
    let count = 0;
    exact.forEach((w, j) => { count += w >= sample.unit / 100 && (bits[j >> 3] >> (j & 7)) & 1; });
    if (count > most.count) most = { count, layer, head, query };
  });
  return { layer: most.layer, head: most.head, query: most.query };
}
// The sample stands behind this script.
if (sample) document.addEventListener("DOMContentLoaded", () => unpack().then((file) => { tensors = file; change(firstView()); }));
