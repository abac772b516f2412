// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string_view>

namespace gradaccum::detail {

/// How a page looks. All charts have the same eight colours, which people who see fewer colours can tell apart as well;
/// by screen in dark as in light, and on paper in light.
inline constexpr std::string_view page_style = R"css(
:root{color-scheme:light dark;--page:#f5f5f2;--card:#fff;--ink:#1c1f22;--soft:#5f656b;--line:#e2e2dc;--grid:#ecece8;
--c1:#0b6aad;--c2:#d05a00;--c3:#00866a;--c4:#ad5a97;--c5:#a17700;--c6:#3f9bd6;--c7:#7263bd;--c8:#71767b;
--running:#0b6aad;--finished:#0a7357;--stopped:#8c5a00;--interrupted:#b0342a}
@media screen and (prefers-color-scheme:dark){
:root{--page:#111315;--card:#191c1f;--ink:#e8e8e4;--soft:#9aa1a8;--line:#2e3338;--grid:#262b2f;
--c1:#5aaef0;--c2:#f29457;--c3:#41c6a3;--c4:#e29fcd;--c5:#e3bd55;--c6:#9bd4fa;--c7:#b2a8f2;--c8:#a6abb0;
--running:#5aaef0;--finished:#41c6a3;--stopped:#e3bd55;--interrupted:#f28b80}}
.s1{--c:var(--c1)}.s2{--c:var(--c2)}.s3{--c:var(--c3)}.s4{--c:var(--c4)}
.s5{--c:var(--c5)}.s6{--c:var(--c6)}.s7{--c:var(--c7)}.s8{--c:var(--c8)}
*{box-sizing:border-box}
html{-webkit-text-size-adjust:100%}
body{margin:0;background:var(--page);color:var(--ink);font:1rem/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"Noto Sans",
"DejaVu Sans",sans-serif;font-variant-numeric:tabular-nums;overflow-wrap:anywhere}
main{max-width:72rem;margin:0 auto;padding:clamp(1rem,4vw,3rem) clamp(1rem,4vw,2.5rem)}
h1,h2,h3,p,dl,dd,ul,figure{margin:0;padding:0}
h1{font-size:clamp(1.5rem,4vw,2.1rem);font-weight:650;line-height:1.2;letter-spacing:-.015em}
h2{font-size:.8rem;font-weight:600;letter-spacing:.06em;text-transform:uppercase;color:var(--soft);margin:0 0 .8rem}
h3{font-size:1rem;font-weight:600}
.title{display:flex;flex-wrap:wrap;align-items:center;gap:.6rem 1rem;margin-bottom:1.4rem}
.state{color:var(--k);border:1px solid;border-radius:1.2rem;padding:.1rem .8rem;font-size:.9rem;font-weight:600}
.state::before{content:"";display:inline-block;width:.5rem;height:.5rem;border-radius:50%;background:currentColor;
margin-right:.5rem;vertical-align:.08rem}
.running{--k:var(--running)}.finished{--k:var(--finished)}.stopped{--k:var(--stopped)}.interrupted{--k:var(--interrupted)}
progress{display:block;width:100%;height:.5rem;border:0;border-radius:.25rem;overflow:hidden;background:var(--line);
-webkit-appearance:none;appearance:none}
progress::-webkit-progress-bar{background:var(--line)}
progress::-webkit-progress-value{background:var(--c1);border-radius:.25rem}
progress::-moz-progress-bar{background:var(--c1);border-radius:.25rem}
.progress{display:flex;flex-wrap:wrap;justify-content:space-between;gap:0 1rem;margin-top:.6rem;font-size:.9rem;
color:var(--soft)}
strong{color:var(--ink);font-weight:600}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(9.5rem,1fr));gap:1px;margin:1.8rem 0 2.4rem;
background:var(--card);border:1px solid var(--line);border-radius:.7rem;overflow:hidden}
.tiles div{padding:.9rem 1.1rem;box-shadow:1px 1px 0 var(--line)}
.tiles dt{font-size:.8rem;color:var(--soft)}
.tiles dd{font-size:1.45rem;font-weight:600;line-height:1.35;letter-spacing:-.01em}
.tiles .note{font-size:.8rem;font-weight:400;letter-spacing:0;min-height:1.2em}
.note{color:var(--soft);font-size:.8rem}
.charts{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,26rem),1fr));gap:1.2rem;margin:2.4rem 0}
.charts h2,.charts>.note{grid-column:1/-1;margin:0}
figure{min-width:0;background:var(--card);border:1px solid var(--line);border-radius:.7rem;padding:1rem 1.1rem .9rem}
figure:first-of-type,figure:last-of-type:nth-of-type(even){grid-column:1/-1}
figcaption{display:flex;flex-wrap:wrap;justify-content:space-between;gap:.1rem 1.2rem;margin-bottom:1.1rem}
.legend{display:flex;flex-wrap:wrap;gap:.1rem 1rem;list-style:none;font-size:.85rem;color:var(--soft)}
.legend li::before{content:"";display:inline-block;width:1.1rem;height:.22rem;border-radius:.11rem;background:var(--c);
margin-right:.45rem;vertical-align:.25rem}
.legend .d::before{background:repeating-linear-gradient(90deg,var(--c) 0 .3rem,transparent .3rem .4rem)}
.plot{display:block;width:calc(100% - 3.6rem);height:12.5rem;margin:0 .8rem 1.7rem 2.8rem;overflow:visible}
figure:first-of-type .plot{height:17rem}
figure .note{margin-top:-.2rem}
.plot text{font-size:.75rem;fill:var(--soft)}
.axes line{stroke:var(--grid);stroke-width:1}
.line{fill:none;stroke:var(--c);stroke-width:1.8;stroke-linejoin:round;stroke-linecap:round;
vector-effect:non-scaling-stroke}
.line.d{stroke-dasharray:5 4}
.band{fill:var(--c);opacity:.17}
.area{fill:var(--c);opacity:.8;stroke:var(--card);stroke-width:1;vector-effect:non-scaling-stroke}
.dot,.plot .key{fill:var(--c)}
.plot .mark{font-size:.65rem;fill:var(--interrupted)}
.readings rect{fill:transparent}
.readings line{stroke:var(--soft);stroke-width:1;pointer-events:none}
.readings text{fill:var(--ink);stroke:var(--card);stroke-width:4;stroke-linejoin:round;paint-order:stroke;
pointer-events:none}
.readings g>line,.readings g>text{visibility:hidden}
.readings g:hover>line,.readings g:hover>text{visibility:visible}
.tables{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,26rem),1fr));gap:2.4rem 2.4rem;align-items:start}
.tables section{min-width:0}
.tables section:first-child{grid-column:1/-1}
table{width:100%;border-collapse:collapse;font-size:.9rem}
th,td{padding:.45rem .8rem .45rem 0;text-align:left;vertical-align:top;border-top:1px solid var(--line)}
th:last-child,td:last-child{padding-right:0}
th{font-weight:400;color:var(--soft)}
thead th{border-top:0;font-size:.8rem}
.curves tbody th{color:var(--ink)}
.curves td,.curves thead th+th{text-align:right}
.curves .run{font-weight:600;padding-top:1.1rem}
.curves td{white-space:nowrap}
.curves small{display:block;color:var(--soft);font-size:.75rem}
.pairs td{text-align:right;white-space:pre-wrap}
@media (min-width:44rem){.curves small{display:inline-block;min-width:5.5rem}}
@media (max-width:30rem){.curves{font-size:.85rem}.curves th,.curves td{padding-right:.5rem}}
@media print{:root{--page:#fff;--card:#fff}body{font-size:9pt}main{max-width:none;padding:0}
.readings{display:none}figure,.tiles,tr{break-inside:avoid}h2{break-after:avoid}
.charts{grid-template-columns:1fr 1fr;gap:.8rem;margin:1.2rem 0}.tiles{margin:1rem 0}
.plot{height:9rem}figure:first-of-type .plot{height:12rem}
*{-webkit-print-color-adjust:exact;print-color-adjust:exact}}
)css";

/// The SHA-256 of the style in base64: the only one that the page lets in. tests/watching says what it has to be.
inline constexpr std::string_view page_style_hash = "yP+XzglaaNXPzPaIrYbiUUmZiav6Bw1NhJS7+rsoFNA=";

}  // namespace gradaccum::detail
