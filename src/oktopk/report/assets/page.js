"use strict";
(() => {
  const text = (id) => document.getElementById(id).textContent;
  const figures = {
    light: JSON.parse(text("figures")),
    dark: JSON.parse(text("figures").replaceAll("#0072B2", "#48a2e0")), // needs more light
  };
  const templates = JSON.parse(text("templates"));
  const dark = matchMedia("(prefers-color-scheme: dark)"), touch = matchMedia("(pointer: coarse)");
  const places = [...document.querySelectorAll("[data-plot]")];
  const hidden = new Set();
  const printed = 660; // pixels; fits on A4 and on letter
  let axis = "step", printing = false;

  const zoom = ["zoomIn2d", "zoomOut2d", "resetScale2d"];
  const config = {
    responsive: true, displaylogo: false, showTips: false,
    modeBarButtons: touch.matches ? [zoom] : [["toImage"], zoom], // none that sends data away
  };

  const theme = () => (dark.matches && !printing ? "dark" : "light");

  function traces(figure) {
    const seconds = axis === "seconds" && figure.seconds.xaxis;
    return structuredClone(figure.data).map((trace) => {
      if (seconds && trace.customdata) [trace.x, trace.customdata] = [trace.customdata, trace.x];
      trace.visible = !(trace.meta && hidden.has(trace.meta.subject));
      return trace;
    });
  }

  function layout(figure) {
    const own = axis === "seconds" ? figure.seconds : {};
    const made = structuredClone({ ...figure.layout, ...own });
    made.template = structuredClone(templates[theme()]);
    made.uirevision = axis; // a zoom outlives everything but the switch
    if (touch.matches) made.dragmode = false; // a finger scrolls the page
    if (printing) made.width = printed; else made.autosize = true;
    return made;
  }

  const draw = (place) => {
    const figure = figures[theme()][place.dataset.plot];
    return Plotly.react(place, traces(figure), layout(figure), config);
  };
  const drawAll = () => places.forEach(draw);

  function print(now) {
    printing = now;
    for (const each of document.querySelectorAll("details")) {
      if (now) each.dataset.open = each.open ? "yes" : "";
      each.open = now || each.dataset.open === "yes";
    }
    drawAll();
    if (!now) places.forEach((place) => Plotly.Plots.resize(place)); // it would keep the paper's width
  }

  for (const input of document.querySelectorAll("input[name=axis]")) {
    input.addEventListener("change", () => { axis = input.value; drawAll(); });
  }
  for (const button of document.querySelectorAll("[data-subject]")) {
    button.addEventListener("click", () => {
      const subject = Number(button.dataset.subject), shown = hidden.has(subject);
      if (shown) hidden.delete(subject); else hidden.add(subject);
      button.setAttribute("aria-pressed", String(shown));
      drawAll();
    });
  }
  dark.addEventListener("change", drawAll);
  addEventListener("beforeprint", () => print(true));
  addEventListener("afterprint", () => print(false));

  const links = new Map([...document.querySelectorAll("nav a")].map((a) => [a.hash.slice(1), a]));
  const watch = new IntersectionObserver((entries) => {
    for (const entry of entries) links.get(entry.target.id)?.classList.toggle("here", entry.isIntersecting);
  }, { rootMargin: "-45% 0px -54% 0px" });
  for (const id of links.keys()) watch.observe(document.getElementById(id));

  // One plot after the other, so that the page can be read meanwhile.
  async function begin() {
    for (const place of places) {
      await draw(place);
      await new Promise((next) => setTimeout(next));
    }
    document.documentElement.dataset.ready = "yes";
  }
  begin();
})();
