// The error of every layer and head under plan A and plan B, on one scale of colours.
const maps = [0, 1].map((side) => {
  const select = make("select", { id: `choose-${side}`, onchange: () => change({
    plans: state.plans.map((plan, i) => (i === side ? Number(select.value) : plan)),
  }) }, ...rows.map((row, i) => make("option", { value: i }, label(row))));
  const grid = make("table", { class: "map" });
  grid.addEventListener("keydown", (event) => step(event, grid));
  const says = make("p", { class: "plan" });
  $("maps").append(make("div", {}, make("div", { class: "choice" },
    make("label", { for: select.id }, `Plan ${"AB"[side]}`), select), says, grid));
  return { select, grid, says };
});

// Arrow keys go from head to head; only the chosen one is reached by tabs.
function step(event, grid) {
  const move = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] }[event.key];
  if (!move) return;
  event.preventDefault();
  const layer = Math.min(data.layers - 1, Math.max(0, state.layer + move[0]));
  const head = Math.min(data.heads - 1, Math.max(0, state.head + move[1]));
  pick(grid, layer, head);
}
function pick(grid, layer, head) {
  change({ layer, head });
  grid.querySelector('button[aria-pressed="true"]').focus({ preventScroll: true });
}

function drawMaps() {
  const shown = state.plans.map((plan) => rows[plan]);
  const most = Math.max(1e-6, ...shown.flatMap((row) => row.heads.flat()));
  maps.forEach(({ select, grid, says }, side) => {
    const row = shown[side];
    select.value = state.plans[side];
    says.replaceChildren(make("b", {}, `error ${row.error.toFixed(3)}`), `, ${row.slots.toFixed(1)} slots. ${row.plan}`);
    const top = make("tr", {}, make("td"), ...row.heads[0].map((_, h) => make("th", { scope: "col" }, make("span", {
      "aria-label": `head ${h}` }, String(h)))));
    const lines = row.heads.map((errors, l) => make("tr", {}, make("th", { scope: "row", "aria-label": `layer ${l}` }, String(l)),
      ...errors.map((error, h) => {
        const share = Math.sqrt(error / most);
        const on = l === state.layer && h === state.head;
        return make("td", {}, make("button", {
          type: "button", "aria-pressed": on, tabindex: on ? 0 : -1, class: share > 0.62 ? "deep" : false,
          "aria-label": `layer ${l}, head ${h}: error ${error.toFixed(3)}`, title: `layer ${l}, head ${h}: error ${error.toFixed(3)}`,
          style: `background:color-mix(in oklab, var(--heat) ${Math.round(8 + 92 * share)}%, var(--card))`,
          onclick: () => { pick(grid, l, h); $("head").scrollIntoView({ block: "nearest" }); },
        }, data.heads > 16 ? "\u00a0" : error.toFixed(2)));
      })));
    grid.replaceChildren(make("caption", { class: "quiet" }, "One row per layer, one column per head. Arrow keys move."), top, ...lines);
  });
  $("scale").textContent = `Both maps use the same colours, from 0 to ${most.toFixed(2)}. Click a head to see below which keys its queries keep.`;
}
listeners.push((what) => { if (["plans", "layer", "head"].some((name) => what.includes(name))) drawMaps(); });
drawMaps();
