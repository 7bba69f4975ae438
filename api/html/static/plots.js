// Draws the plots of a page with plotly, which is loaded when the first plot comes into view.
// A plot is drawn again when its campaign changes, when the stream of events comes back after a gap,
// when the page's choices change, and when the theme changes.
const REDRAW_MS = 1000; // between two requests of one plot
const PRINTED_PX = 690; // the width of a printed page (A4 or letter) between its margins
// After these events every plot is as before: plots show attempts that run and trials that ended.
const NO_PLOT = new Set([
  "campaign.progress",
  "worker.changed",
  "nodes.changed",
  "plan.ended",
  "trial.added",
]);
// These are about attempts, which the timeline alone shows.
const TIMELINE = new Set(["trial.leased", "trial.returned"]);
const meta = (name) => document.querySelector(`meta[name=${name}]`).content;
const plots = new Map(); // by the element: what is known of a plot
const dark = matchMedia("(prefers-color-scheme: dark)");
let loading = null; // plotly
let chosen = location.search; // the choices that the plots show
let printing = false;

/** Loads plotly. The page's policy forbids style attributes, but allows the CSSOM. */
function plotly() {
  loading ??= new Promise((loaded, failed) => {
    const set = Element.prototype.setAttribute;
    Element.prototype.setAttribute = function (name, value) {
      if (name === "style" && this.style) this.style.cssText = value;
      else set.call(this, name, value);
    };
    const script = document.createElement("script");
    script.src = meta("plotly");
    script.onload = () => loaded(window.Plotly);
    script.onerror = () => {
      loading = null;
      failed(new Error("the plot library could not be loaded"));
    };
    document.head.append(script);
  });
  return loading;
}

const watcher = new IntersectionObserver(
  (entries) => {
    for (const { target, isIntersecting } of entries) {
      const plot = plots.get(target);
      if (!plot) continue;
      plot.visible = isIntersecting;
      if (isIntersecting) refresh(target, plot);
    }
  },
  { rootMargin: "150px" },
);

/** Finds the plots of the page, also after a part of it was replaced. */
function find() {
  for (const element of plots.keys()) {
    if (element.isConnected) continue;
    watcher.unobserve(element);
    window.Plotly?.purge(element);
    plots.delete(element);
  }
  for (const element of document.querySelectorAll(".plot[data-plot]")) {
    if (plots.has(element)) continue;
    plots.set(element, { stale: true, visible: false, busy: false, asked: -REDRAW_MS });
    watcher.observe(element);
  }
}

/** Has all plots drawn again, or those whose elements are `concerned`. */
function stale(concerned = () => true) {
  for (const [element, plot] of plots) {
    if (!concerned(element)) continue;
    plot.stale = true;
    refresh(element, plot);
  }
}

async function refresh(element, plot) {
  if (!plot.stale || !plot.visible || plot.busy || document.hidden) return;
  plot.busy = true;
  const wait = plot.asked + REDRAW_MS - performance.now();
  if (wait > 0) await new Promise((done) => setTimeout(done, wait));
  plot.stale = false;
  plot.asked = performance.now();
  try {
    const answer = await fetch(address(element));
    if (!answer.ok) throw new Error(`the service answered ${answer.status}`);
    plot.data = await answer.json();
    await draw(element, plot.data);
    element.removeAttribute("data-problem");
  } catch (error) {
    element.dataset.problem = `This plot could not be drawn: ${error.message}.`;
  } finally {
    plot.busy = false;
  }
  refresh(element, plot);
}

/** The address of the data, with what the page's address chooses. */
function address(element) {
  const url = new URL(element.dataset.plot, location.href);
  for (const [name, value] of new URLSearchParams(location.search)) {
    if (!url.searchParams.has(name)) url.searchParams.set(name, value);
  }
  return url;
}

async function draw(element, { data, layout }) {
  element.classList.toggle("empty", data.length === 0);
  if (data.length === 0) {
    window.Plotly?.purge(element);
    return;
  }
  const library = await plotly();
  const colours = getComputedStyle(document.documentElement);
  const { min_width: width, height } = layout.meta ?? {};
  element.style.minWidth = width && !printing ? `${width}px` : "";
  element.style.minHeight = element.style.height = height ? `${height}px` : "";
  const drawn = await library.react(
    element,
    coloured(data, colours),
    { ...coloured(layout, colours), ...frame(colours, element), ...size(element) },
    { responsive: true, displaylogo: false, modeBarButtonsToRemove: ["select2d", "lasso2d"] },
  );
  if (!element.dataset.drawn) drawn.on("plotly_click", openTrial);
  element.dataset.drawn = String(Number(element.dataset.drawn ?? 0) + 1);
}

/** A copy in which names of the style's variables are replaced by their values. */
function coloured(value, colours) {
  if (typeof value === "string") {
    return value.startsWith("--") ? colours.getPropertyValue(value).trim() : value;
  }
  if (Array.isArray(value)) return value.map((each) => coloured(each, colours));
  if (value === null || typeof value !== "object") return value;
  return Object.fromEntries(
    Object.entries(value).map(([name, each]) => [name, coloured(each, colours)]),
  );
}

/** Fonts, grid and margins by the theme and the width. */
function frame(colours, element) {
  const colour = (name) => colours.getPropertyValue(name).trim();
  const axis = {
    gridcolor: colour("--line"),
    zerolinecolor: colour("--line"),
    linecolor: colour("--soft"),
    tickcolor: colour("--soft"),
    automargin: true,
    title: { standoff: 10, font: { size: 12 } },
  };
  const legend = { orientation: "h", x: 0, y: 1.02, yanchor: "bottom", font: { size: 12 } };
  const narrow = element.clientWidth < 520;
  return {
    template: {
      layout: {
        paper_bgcolor: "rgba(0,0,0,0)",
        plot_bgcolor: "rgba(0,0,0,0)",
        font: {
          family: getComputedStyle(document.body).fontFamily,
          size: 12,
          color: colour("--soft"),
        },
        xaxis: axis,
        yaxis: axis,
        legend,
        hoverlabel: {
          bgcolor: colour("--ground"),
          bordercolor: colour("--soft"),
          font: { color: colour("--ink") },
        },
        modebar: {
          bgcolor: "rgba(0,0,0,0)",
          color: colour("--soft"),
          activecolor: colour("--ink"),
          orientation: "v",
        },
        margin: { l: narrow ? 44 : 60, r: narrow ? 24 : 40, t: 30, b: 44 },
        hovermode: "closest",
      },
    },
    autosize: true,
    // Zoom is kept while the choices of the plot are the same.
    uirevision: address(element).search,
  };
}

/** The size on paper, where nothing resizes a plot; empty on screens. */
function size(element) {
  if (!printing) return {};
  const share = element.closest(".slices") ? 0.48 : 1;
  return { autosize: false, width: PRINTED_PX * share, height: element.clientHeight };
}

function openTrial({ points: [point] }) {
  if (point.data.type !== "heatmap" && point.customdata) {
    location.assign(meta("trial-pages") + point.customdata);
  }
}

find();
document.addEventListener("page-swapped", () => {
  find();
  if (chosen !== location.search) stale();
  chosen = location.search;
});
document.addEventListener("service-event", ({ detail }) => {
  if (NO_PLOT.has(detail.kind)) return;
  stale((element) => !TIMELINE.has(detail.kind) || element.id === "plot-timeline");
});
document.addEventListener("visibilitychange", () => {
  for (const [element, plot] of plots) refresh(element, plot);
});
addEventListener("beforeprint", () => {
  if (!window.Plotly) return;
  printing = true;
  for (const [element, plot] of plots) {
    if (plot.stale || !plot.data) plot.data = dataNow(element) ?? plot.data;
    // The browser prints as soon as this handler has ended, and does not wait for answers.
    if (plot.data) draw(element, plot.data);
  }
});
addEventListener("afterprint", () => {
  printing = false;
  for (const [element, plot] of plots) if (plot.data) draw(element, plot.data);
});

/** The data of a plot, before the next line runs; null where the service does not answer. */
function dataNow(element) {
  const request = new XMLHttpRequest();
  request.open("GET", address(element), false);
  try {
    request.send();
    return request.status === 200 ? JSON.parse(request.responseText) : null;
  } catch {
    return null;
  }
}

dark.addEventListener("change", () => {
  for (const [element, plot] of plots) if (plot.data) draw(element, plot.data);
});
