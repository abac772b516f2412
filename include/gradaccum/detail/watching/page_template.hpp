// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string_view>

namespace gradaccum::detail {

/// The page of a run up to its JSON. Its content security policy allows only this style and this script, by their
/// SHA-256; tests/watching/browser.py checks the hashes.
inline constexpr std::string_view page_before_json = R"html(<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; base-uri 'none'; form-action 'none';
style-src 'sha256-1jd1Myexv9bb7UbbVuM0dOv0FYB1vn01Kuey27jFCQs=';
script-src 'sha256-G/7UPoHwL4+/iQH3qJJrQzQ9mbj0XVQRWCsRs+6UcDI='">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>Training</title>
<style>
:root{color-scheme:light dark;--page:#f5f5f2;--card:#fff;--ink:#1c1f22;--soft:#5f656b;--line:#e2e2dc;--grid:#ecece8;
--c0:#0b6aad;--c1:#d05a00;--c2:#00866a;--c3:#ad5a97;--c4:#a17700;--c5:#3f9bd6;--c6:#7263bd;--c7:#71767b;
--running:#0b6aad;--finished:#0a7357;--stopped:#8c5a00;--interrupted:#b0342a}
@media screen and (prefers-color-scheme:dark){
:root{--page:#111315;--card:#191c1f;--ink:#e8e8e4;--soft:#9aa1a8;--line:#2e3338;--grid:#262b2f;
--c0:#5aaef0;--c1:#f29457;--c2:#41c6a3;--c3:#e29fcd;--c4:#e3bd55;--c5:#9bd4fa;--c6:#b2a8f2;--c7:#a6abb0;
--running:#5aaef0;--finished:#41c6a3;--stopped:#e3bd55;--interrupted:#f28b80}}
*{box-sizing:border-box;margin:0}
body{max-width:72rem;margin:auto;padding:clamp(1rem,4vw,2.5rem);background:var(--page);color:var(--ink);
font:1rem/1.5 system-ui,"Noto Sans","DejaVu Sans",sans-serif;font-variant-numeric:tabular-nums;overflow-wrap:anywhere}
h1{font-size:clamp(1.5rem,4vw,2.1rem);line-height:1.2}
h2{font-size:1.1rem;margin:2rem 0 .6rem}
h3{font-size:1rem}
header,figcaption,ul{display:flex;flex-wrap:wrap;align-items:center;gap:.2rem 1rem}
#state{border:1px solid;border-radius:1rem;padding:.1rem .8rem;font-size:.9rem;font-weight:600}
progress{width:100%;height:.5rem;margin-top:1rem;accent-color:var(--c0)}
.note,small,#progress{color:var(--soft);font-size:.8rem}
#tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(8.5rem,1fr));gap:.8rem;margin:1.4rem 0}
#tiles div,figure{background:var(--card);border:1px solid var(--line);border-radius:.6rem;padding:.7rem 1rem;
min-width:0}
#tiles b{display:block;font-size:1.4rem;line-height:1.35}
#charts{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,26rem),1fr));gap:1rem}
figure{position:relative}
figure:first-child,figure:last-child:nth-child(even){grid-column:1/-1}
ul{list-style:none;padding:0;margin-left:auto;font-size:.85rem;color:var(--soft)}
i{display:inline-block;width:1.1rem;height:0;border-top:.2rem solid;margin-right:.4rem;vertical-align:.25rem}
i.dashed{border-top-style:dashed}
button{font:inherit;font-size:.75rem;color:var(--soft);background:none;border:1px solid var(--line);border-radius:.3rem;
padding:0 .4rem;cursor:pointer}
button[aria-pressed=true]{color:var(--card);background:var(--soft)}
svg{display:block;width:100%;height:14rem;margin-top:.5rem}
svg svg{margin:0}
figure:first-child>svg{height:18rem}
text{font-size:.75rem;fill:var(--soft)}
.grid{stroke:var(--grid)}
.hover{stroke:var(--soft)}
.line{fill:none;stroke-width:1.8;stroke-linejoin:round;stroke-linecap:round}
.line.dashed{stroke-dasharray:5 4}
.band{opacity:.17}
.area{opacity:.85}
.mark{fill:var(--interrupted);font-size:.65rem}
output{position:absolute;top:3.2rem;z-index:1;pointer-events:none;white-space:nowrap;background:var(--card);
border:1px solid var(--line);border-radius:.4rem;padding:.3rem .6rem;font-size:.8rem;
box-shadow:0 .1rem .6rem #0003;max-width:100%;overflow:hidden}
#tables{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,26rem),1fr));gap:0 2.4rem;align-items:start}
section{min-width:0}
section:first-child{grid-column:1/-1}
table{width:100%;border-collapse:collapse;font-size:.9rem}
th,td{padding:.4rem .8rem .4rem 0;text-align:left;vertical-align:top;border-top:1px solid var(--line);font-weight:400}
td{text-align:right;white-space:pre-wrap;padding-right:0;padding-left:.8rem}
th{min-width:7rem}
.run th{font-weight:600;padding-top:1rem}
[hidden]{display:none}
@media print{body{padding:0;font-size:9pt}figure,tr{break-inside:avoid}button{display:none}
*{-webkit-print-color-adjust:exact;print-color-adjust:exact}}
</style>
</head>
<body>
<noscript>This page draws its curves by a script of its own: allow it to run scripts.</noscript>
<header><h1></h1><p id="state"></p></header>
<progress hidden aria-label="done"></progress>
<p id="progress"></p>
<div id="tiles"></div>
<main id="charts"></main>
<div id="tables"></div>
<template><figure><figcaption><h3></h3><button title="A logarithmic scale">log</button><ul></ul></figcaption>
<svg role="img"></svg><output hidden></output><p class="note"></p></figure></template>
<script id="run" type="application/json">)html";

/// The rest of the page, after its JSON. The script sets text by `textContent` only, so that names cannot become
/// markup.
inline constexpr std::string_view page_after_json = R"html(</script>
<script>
'use strict';
const at = id => document.getElementById(id), run = JSON.parse(at('run').textContent);
const template = document.querySelector('template').content.firstElementChild;
const svgSpace = template.querySelector('svg').namespaceURI;

// Control characters and marks that change the direction of text are shown as a visible replacement.
const unseen = /(?![\n\t])[\p{Cc}\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\ufeff]/gu;
const clean = (text, most = 1e4) => (text.length > most ? text.slice(0, most) + '…' : text).replace(unseen, '\ufffd');
const make = (to, tag, text = '', attributes = {}) => {
  const one = to.namespaceURI === svgSpace ? document.createElementNS(svgSpace, tag) : document.createElement(tag);
  for (const name in attributes) one.setAttribute(name, attributes[name]);
  one.textContent = clean(text);
  return to.appendChild(one);
};
const number = value => {
  if (typeof value !== 'number') return clean(value ?? '–');
  const size = Math.abs(value);
  if (size && (size < 1e-3 || size >= 1e15)) return Number(value.toPrecision(4)).toExponential().replace('+', '');
  return value.toLocaleString('en', size < 1000 ? {maximumSignificantDigits: 4} : {maximumFractionDigits: 0});
};
// All ticks of an axis in one form, which the largest of them asks for.
const tickText = (value, largest) => value === 0 ? '0'
  : largest < 1e-2 || largest >= 1e15 ? Number(value.toPrecision(6)).toExponential().replace('+', '')
  : value.toLocaleString('en', {notation: largest < 1e4 ? 'standard' : 'compact', maximumSignificantDigits: 6});
const duration = seconds => {
  const hours = Math.floor(seconds / 3600), two = value => String(Math.floor(value % 60)).padStart(2, '0');
  return (hours ? hours + ':' + two(seconds / 60) : Math.floor(seconds / 60)) + ':' + two(seconds);
};
const least = (all, of) => all.reduce((best, one) => best && of(best) <= of(one) ? best : one, undefined);
const nearest = (points, x) => least(points, point => Math.abs(point.x - x));
const finiteOf = points => points.filter(point => point.mean !== null);

// A curve's chart is named by the part of its name after the last `/`; all curves of memory/ share one, in MB or GB.
const isMemory = name => name.startsWith('memory/'), pieces = run.runs.flatMap(one => one.curves);
const inGB = pieces.some(([name, , all]) => isMemory(name) && all.some(piece => piece[4] >= 10 * 2 ** 30));
const [unit, unitName] = inGB ? [2 ** 30, 'GB'] : [2 ** 20, 'MB'];
const known = new Map([['loss', ['Loss', 0]], ['accuracy', ['Accuracy', 1]], ['lr', ['Learning rate', 3]],
  ['grad_norm', ['Gradient norm', 4]], ['samples_per_second', ['Samples per second', 5]],
  ['memory/', [`Memory (${unitName})`, 6]]]);
const knownOf = chart => known.get(chart) ?? [chart || 'curve', 2];
const curveOf = ([name, last, all]) => {
  const slash = name.lastIndexOf('/'), series = isMemory(name) ? name.slice(7) : name.slice(0, Math.max(slash, 0));
  const scaled = value => typeof value === 'number' && isMemory(name) ? value / unit : value;
  const points = all.map(([first, last, mean, low, high, lowAt, highAt, gaps]) => ({first, last, x: (first + last) / 2,
    mean: scaled(mean), low: scaled(low), high: scaled(high), lowAt, highAt, gaps}));
  const finite = finiteOf(points), low = least(finite, point => point.low), high = least(finite, point => -point.high);
  return {name, series, chart: isMemory(name) ? 'memory/' : name.slice(slash + 1), points, finite,
    last: [scaled(last), points.at(-1)?.last], low: [low?.low, low?.lowAt], high: [high?.high, high?.highAt]};
};
const runs = run.runs.map(({name, curves}) => ({name, curves: curves.map(curveOf).filter(one => one.points.length)}))
  .filter(one => one.name || one.curves.length);
const single = runs.length === 1;

// Each layer of a stack is raised by those below it.
const stack = curves => {
  const base = least(curves, curve => -curve.finite.length).finite, sums = base.map(() => 0);
  return curves.map(curve => base.map((point, i) => {
    sums[i] += nearest(curve.finite, point.x)?.mean ?? 0;
    return {...point, mean: sums[i], low: sums[i], high: sums[i], gaps: 0};
  }));
};
// The colour of a series shows its run; with a single run, its prefix.
const seriesOf = chart => runs.flatMap(({name, curves}, place) => {
  const prefixes = new Set(['train', ...curves.filter(curve => !isMemory(curve.chart)).map(curve => curve.series)]);
  const here = curves.filter(curve => curve.chart === chart);
  const layers = isMemory(chart) && here.some(one => one.finite.length) && stack(here);
  const all = here.map(({series, points, finite}, i) => {
    const drawn = layers ? layers[i] : points, both = [name, here.length > 1 && !layers && series];
    return {points: drawn, finite: finiteOf(drawn), read: single ? finite : finiteOf(drawn),
      name: !single && both.filter(Boolean).join(' · ') || series || chart, dashed: !single && i > 0 && !layers,
      colour: `var(--c${(!single ? place : layers ? i : [...prefixes].indexOf(series || 'train')) % 8})`};
  });
  return layers && !single ? all.slice(-1) : all;
});
const charts = [...new Set(runs.flatMap(one => one.curves.map(curve => curve.chart)))]
  .sort((a, b) => knownOf(a)[1] - knownOf(b)[1]).slice(0, 100).map(name => ({name, series: seriesOf(name)}));

const begins = charts.flatMap(({series}) => series.flatMap(one => one.points.slice(0, 1)));

// A few numbers that lie far outside of all others are cut off, since they would flatten the rest.
const rangeOf = share => {
  const [min, a, b, max] = [0, .02, .98, 1].map(part => Math.min(Math.max(share(part), -1e300), 1e300));
  const spread = Math.max((b - a) / 2, 5e-4 * Math.max(Math.abs(a), Math.abs(b)));
  let low = a - min > 6 * spread ? a - spread / 2 : min, high = max - b > 6 * spread ? b + spread / 2 : max;
  if (low > 0 && low < .3 * high) low = 0;
  const size = Math.max(Math.abs(low), Math.abs(high));
  if (size < 1e-290) return [0, 1];
  return high - low > 2e-9 * size ? [low, high] : [Math.min(low, 0), Math.max(high, 0)];  // of one number: from 0
};
// Ticks at multiples of 1, 2 or 5 times a power of ten; an axis of updates ends at the last update.
const axisOf = ([low, high], steps, isWhole) => {
  const size = Math.max(high / steps - low / steps, isWhole ? 1 : 0), power = 10 ** Math.floor(Math.log10(size));
  const step = [1, 2, 5, 10].map(digit => digit * power).find(one => one >= size * (1 - 1e-9));
  const from = isWhole ? low : Math.floor(low / step + 1e-6) * step;
  const to = isWhole ? high : Math.ceil(high / step - 1e-6) * step;
  const first = Math.ceil(from / step - 1e-6), count = Math.min(Math.floor(to / step + 1e-6) - first + 1, 50);
  return {ticks: Array.from({length: count}, (_, i) => (first + i) * step),
    place: value => (value - from) / (to - from)};
};
const decadesOf = (low, high) => {
  const from = Math.floor(Math.log10(low)), to = Math.max(Math.ceil(Math.log10(high)), from + 1);
  const every = Math.ceil((to - from) / 6), count = Math.floor((to - from) / every) + 1;
  return {ticks: Array.from({length: count}, (_, i) => Number('1e' + (from + every * i))),
    place: value => (Math.log10(value) - from) / (to - from)};
};
// An axis begins where the page's first curve does, so that a late curve is seen as one.
const updatesOf = points => {
  const {last} = least(points, point => -point.last), first = least([...points, ...begins], point => point.first).first;
  const from = first > 0 && first < .1 * last ? 0 : first;
  return axisOf([from, Math.max(last, from + 1)], 5, true);
};

// Charts whose scale was switched are stored in the page's address, so that they survive a reload.
const switched = new Set(location.hash.slice(1).split('&').filter(Boolean));
const keyOf = chart => 'log=' + encodeURIComponent(chart.name);  // no element's id, to which a browser would scroll
const frameOf = (chart, width, height) => {
  const points = chart.series.flatMap(one => one.points), finite = finiteOf(points);
  const isStack = isMemory(chart.name) && single;
  const low = point => single ? point.low : point.mean, high = point => single ? point.high : point.mean;
  const sorted = finite.flatMap(point => [low(point), point.mean, high(point)]).sort((a, b) => a - b);
  const quantile = part => sorted[Math.round(part * (sorted.length - 1))] ?? 0;
  const share = sorted.length < 30 ? part => quantile(Math.round(part)) : quantile;
  const canLog = !isStack && sorted[0] > 0, spans = chart.name === 'lr' && quantile(.9) >= 60 * quantile(.1);
  const isLog = canLog && spans !== switched.has(keyOf(chart)), x = updatesOf(points);
  const range = isStack ? [0, Math.max(share(1), 0) || 1] : rangeOf(share);
  const y = isLog ? decadesOf(share(0), share(1)) : axisOf(range, 4);
  const above = finite.filter(point => y.place(high(point)) > 1 + 1e-6), gaps = points.filter(point => point.gaps);
  const below = finite.filter(point => y.place(low(point)) < -1e-6);
  return {width, height, x, y, canLog, isLog, isStack, finite, above, below, gaps,
    across: update => width * x.place(update), down: value => height * Math.min(Math.max(1 - y.place(value), -1), 2)};
};
const drawAxes = (svg, {x, y, isLog, across, down, width, height}) => {
  const textOf = (tick, ticks) => tickText(tick, Math.max(...ticks.map(Math.abs)));
  const label = (text, x, y, anchor, kind) => make(svg, 'text', text, {x, y, 'text-anchor': anchor, class: kind});
  for (const tick of y.ticks) {
    make(svg, 'line', '', {class: 'grid', x2: width, y1: down(tick), y2: down(tick)});
    label(textOf(tick, isLog ? [tick] : y.ticks), -8, down(tick) + 4, 'end', 'tick');
  }
  for (const tick of x.ticks) label(textOf(tick, x.ticks), across(tick), height + 17, 'middle', 'tick');
  label('update', width, height + 33, 'end', '');
};
// Returns whether a curve hides another: nine of ten points are within two pixels of it.
const hides = ({finite: one}, {finite: other}, down) => {
  let i = 0;
  const same = ({x, mean}) => {
    while (Math.abs(other[i + 1]?.x - x) <= Math.abs(other[i].x - x)) ++i;
    return Math.abs(down(mean) - down(other[i].mean)) < 2;
  };
  const alike = Math.min(one.length, 2) === Math.min(other.length, 2);  // one point lies on a curve by chance
  return alike && one.length > 0 && one.filter(same).length >= .9 * one.length;
};
const drawSeries = (plot, {points, colour, dashed, under}, {across, down, isStack}) => {
  const place = (point, key) => across(point.x).toFixed(1) + ' ' + down(point[key] ?? 0).toFixed(1);
  const path = (part, key) => part.map(point => place(point, key)).join('L');
  const area = (part, top, bottom, kind) => make(plot, 'path', '',
    {class: kind, fill: colour, d: `M${path(part, top)}L${path([...part].reverse(), bottom)}Z`});
  const parts = [[]];
  for (const point of points) point.mean === null ? parts.push([]) : parts.at(-1).push(point);
  for (const part of parts.filter(part => part.length)) {
    if (isStack) area(part, 'mean', 'zero', 'area');
    else if (single && part.some(point => point.low < point.high)) area(part, 'high', 'low', 'band');
    const line = make(plot, 'path', '',
      {class: dashed ? 'line dashed' : 'line', stroke: colour, d: `M${path(part, 'mean')}h0`});
    const dash = 18 / (1 + under.length);  // the curves below show in the gaps
    if (under.length) Object.assign(line.style, {strokeLinecap: 'butt', strokeDasharray: `${dash} ${18 - dash}`});
    if (points.length <= 40 && !isStack) {
      const r = 2.5 / (1 + under.length);
      for (const {x, mean} of part) make(plot, 'circle', '', {r, fill: colour, cx: across(x), cy: down(mean)});
    }
  }
};
const drawMarks = (svg, note, series, {above, below, gaps, across, height}) => {
  const mark = (sign, x, y) => make(svg, 'text', sign, {class: 'mark', x: across(x), y, 'text-anchor': 'middle'});
  for (const point of above) mark('▲', point.highAt, 4);
  for (const point of below) mark('▼', point.lowAt, height + 5);
  for (const point of gaps) mark('×', point.x, height - 2);
  const top = least(above, point => -point.high), bottom = least(below, point => point.low);
  const sum = gaps.reduce((all, point) => all + point.gaps, 0);
  const upper = series.filter(one => one.under.length).map(one => clean(one.name, 60));
  note.textContent = [top && `▲ cut off: up to ${number(top.high)} at update ${number(top.highAt)}.`,
    bottom && `▼ cut off: down to ${number(bottom.low)} at update ${number(bottom.lowAt)}.`,
    sum && `× NaN or infinite: ${number(sum)}.`,
    upper.length && `Dashed, since on other curves: ${upper.slice(0, 12).join(', ')}.`].filter(Boolean).join(' ');
};
const addKey = (to, {colour, dashed, name}, text = '') => {
  make(to, 'i', '', {class: dashed ? 'dashed' : ''}).style.borderColor = colour;
  to.append(clean(name, 60) + text);
};
const showNumbers = (svg, plot, output, series, {finite, across, width, height}, left) => {
  const line = make(plot, 'line', '', {class: 'hover', y2: height, visibility: 'hidden'});
  const reading = (near, x) => ' ' + number(near.mean)
    + (near.low < near.high ? ` (${number(near.low)} – ${number(near.high)})` : '')
    + (Math.abs(across(near.x) - across(x)) > 12 ? ` at ${number(Math.round(near.x))}` : '');
  svg.onpointerleave = () => { output.hidden = true; line.setAttribute('visibility', 'hidden'); };
  svg.onpointermove = event => {
    const pointer = event.clientX - svg.getBoundingClientRect().left - left;
    const {x} = least(finite, point => Math.abs(across(point.x) - pointer)) ?? {};
    if (x === undefined) return;
    output.replaceChildren(`update ${number(Math.round(x))}`);
    for (const one of series.slice(0, 12)) {
      const near = nearest(one.read, x);
      if (near) addKey(make(output, 'div'), one, reading(near, x));
    }
    for (const end of ['x1', 'x2']) line.setAttribute(end, across(x));
    line.setAttribute('visibility', 'visible');
    output.hidden = false;
    output.style.left = Math.max(left + across(x) + (across(x) < width / 2 ? 30 : -output.offsetWidth), 8) + 'px';
  };
};
const draw = chart => {
  const {figure, series} = chart, svg = figure.querySelector('svg'), button = figure.querySelector('button'), left = 54;
  const width = Math.max(svg.clientWidth - left - 14, 50), height = Math.max(svg.clientHeight - 46, 50);
  const frame = frameOf(chart, width, height);
  svg.replaceChildren();
  svg.setAttribute('viewBox', `${-left} -8 ${width + left + 14} ${height + 46}`);
  drawAxes(svg, frame);
  const plot = make(svg, 'svg', '', {x: -4, y: -3, width: width + 8, height: height + 6});  // clips the curves
  plot.setAttribute('viewBox', `-4 -3 ${width + 8} ${height + 6}`);
  series.forEach((one, i) => one.under = series.slice(0, frame.isStack ? 0 : i)
    .filter(other => hides(one, other, frame.down) || hides(other, one, frame.down)));
  for (const one of frame.isStack ? [...series].reverse() : series) drawSeries(plot, one, frame);
  drawMarks(svg, figure.querySelector('.note'), series, frame);
  showNumbers(svg, plot, figure.querySelector('output'), series, frame, left);
  button.hidden = !frame.canLog;
  button.setAttribute('aria-pressed', frame.isLog);
  button.onclick = () => {
    switched.delete(keyOf(chart)) || switched.add(keyOf(chart));
    history.replaceState(null, '', '#' + [...switched].join('&'));
    draw(chart);
  };
};
for (const chart of charts) {
  const {series} = chart, figure = chart.figure = at('charts').appendChild(template.cloneNode(true));
  const heading = figure.querySelector('h3').textContent = clean(knownOf(chart.name)[0], 60);
  figure.querySelector('svg').setAttribute('aria-label', heading + ', by update; its numbers are in the table below');
  if (series.length > 1 || !['train', chart.name].includes(series[0].name))
    for (const one of series) addKey(make(figure.querySelector('ul'), 'li'), one);
}
addEventListener('resize', () => charts.forEach(draw));

const addTile = (name, value, note) => {
  const tile = make(at('tiles'), 'div');
  make(tile, 'small', name);
  make(tile, 'b', number(value));
  make(tile, 'small', note);
};
const addTable = (heading, rows) => {
  if (!rows.length) return;
  const section = make(at('tables'), 'section');
  make(section, 'h2', heading);
  const table = make(section, 'table');
  for (const [name, ...cells] of rows.slice(0, 600)) {
    const row = make(table, 'tr', '', {class: cells.length ? '' : 'run'});
    make(row, 'th', name, {scope: 'row', colspan: cells.length ? 1 : 4});
    for (const text of cells) make(row, 'td', text);
  }
};
const where = ({chart}, [value, update]) => update === undefined ? number(value)
  : number(value) + (isMemory(chart) ? ' ' + unitName : '') + ' at ' + number(update);
const share = run.fraction === null ? [] : [Math.floor(100 * run.fraction) + ' %'], isRunning = run.state === 'running';
document.title = clean([...(isRunning ? share : []), run.title].join(' · '));
document.querySelector('h1').textContent = clean(run.title, 120);
const state = run.state === 'stopped' ? 'stopped early' : run.state;
at('state').textContent = clean([state, run.reason].filter(Boolean).join(': '), 300);
at('state').style.color = `var(--${run.state})`;
document.querySelector('progress').hidden = !share.length;
document.querySelector('progress').value = run.fraction ?? 0;
at('progress').textContent = [...share, (isRunning ? 'for ' : '') + duration(run.seconds),
  ...(isRunning && run.left !== null ? [duration(run.left) + ' left'] : []), 'written ' + run.written].join(' · ');
for (const [name, value, note] of run.tiles) addTile(name, value, note);
for (const [metric, best] of single && run.tiles.length ? [['loss', 'low'], ['accuracy', 'high']] : []) {
  const isIt = ({chart, series, finite}) => chart === metric && series && series !== 'train' && finite.length;
  const curve = runs[0].curves.find(isIt);
  const prefix = curve?.series === 'validation' ? '' : curve?.series + ' ';
  if (curve) addTile(`best ${prefix}${metric}`, curve[best][0], 'at update ' + number(curve[best][1]));
}
charts.forEach(draw);
const curveRows = ({name, curves}) => [...(name ? [[name]] : []),
  ...curves.map(curve => [curve.name, where(curve, curve.last), where(curve, curve.low), where(curve, curve.high)])];
if (charts.length) addTable('Curves', [['', 'last', 'lowest', 'highest'], ...runs.flatMap(curveRows)]);
addTable('Summary', run.numbers.map(([name, value, text]) => [name, text || number(value)]));
addTable('Settings', run.settings);
if (isRunning) setTimeout(() => location.reload(), 1000 * run.refresh);
</script>
</body>
</html>
)html";

}  // namespace gradaccum::detail
