// @ts-check
/** LaTeX commands that are one character, and the letters of its alphabets. */

/** @param {string} pairs "name character name character ..." @returns {[string, string][]} */
function table(pairs) {
  const words = pairs.trim().split(/\s+/);
  return words.flatMap((word, index) => (index % 2 === 0 ? [/** @type {[string, string]} */ ([word, words[index + 1]])] : []));
}

/** Commands of letters, such as \alpha. */
export const LETTERS = new Map(
  table(`
  alpha α beta β gamma γ delta δ epsilon ϵ varepsilon ε zeta ζ eta η theta θ vartheta ϑ iota ι kappa κ lambda λ mu μ
  nu ν xi ξ omicron ο pi π varpi ϖ rho ρ varrho ϱ sigma σ varsigma ς tau τ upsilon υ phi ϕ varphi φ chi χ psi ψ omega ω
  Gamma Γ Delta Δ Theta Θ Lambda Λ Xi Ξ Pi Π Sigma Σ Upsilon Υ Phi Φ Psi Ψ Omega Ω
  infty ∞ partial ∂ nabla ∇ ell ℓ hbar ℏ Re ℜ Im ℑ aleph ℵ beth ℶ wp ℘ imath ı jmath ȷ emptyset ∅ varnothing ∅ top ⊤
  bot ⊥ angle ∠ triangle △ square □ Box □ blacksquare ■ degree ° prime ′ dagger † ddagger ‡ S § P ¶ checkmark ✓
  ldots … dots … cdots ⋯ vdots ⋮ ddots ⋱ dotsc … dotsb ⋯ clubsuit ♣ diamondsuit ♢ heartsuit ♡ spadesuit ♠ flat ♭
  `),
);

/** Commands of operators and relations. */
export const OPERATORS = new Map(
  table(`
  times × cdot ⋅ div ÷ pm ± mp ∓ ast ∗ star ⋆ circ ∘ bullet ∙ oplus ⊕ ominus ⊖ otimes ⊗ odot ⊙ wedge ∧ land ∧ vee ∨
  lor ∨ lnot ¬ neg ¬ cap ∩ cup ∪ setminus ∖ sqcap ⊓ sqcup ⊔ amalg ⨿ dotplus ∔ ltimes ⋉ rtimes ⋊ diamond ⋄ colon : mid ∣
  le ≤ leq ≤ ge ≥ geq ≥ ne ≠ neq ≠ ll ≪ gg ≫ equiv ≡ sim ∼ simeq ≃ approx ≈ cong ≅ propto ∝ asymp ≍ doteq ≐ prec ≺
  succ ≻ preceq ⪯ succeq ⪰ leqslant ⩽ geqslant ⩾ lesssim ≲ gtrsim ≳ coloneqq ≔ triangleq ≜ in ∈ notin ∉ ni ∋ subset ⊂
  supset ⊃ subseteq ⊆ supseteq ⊇ subsetneq ⊊ nsubseteq ⊈ sqsubseteq ⊑ perp ⟂ parallel ∥ nmid ∤ models ⊨ vdash ⊢ dashv ⊣
  forall ∀ exists ∃ nexists ∄ therefore ∴ because ∵ to → rightarrow → leftarrow ← gets ← leftrightarrow ↔ Rightarrow ⇒
  implies ⟹ Leftarrow ⇐ impliedby ⟸ Leftrightarrow ⇔ iff ⟺ longrightarrow ⟶ longleftarrow ⟵ Longrightarrow ⟹ mapsto ↦
  longmapsto ⟼ hookrightarrow ↪ rightharpoonup ⇀ rightleftharpoons ⇌ leadsto ⇝ uparrow ↑ downarrow ↓ updownarrow ↕
  Uparrow ⇑ Downarrow ⇓ nearrow ↗ searrow ↘ langle ⟨ rangle ⟩ lfloor ⌊ rfloor ⌋ lceil ⌈ rceil ⌉ lbrace { rbrace } lvert |
  rvert | lVert ‖ rVert ‖ vert | Vert ‖ | ‖ { { } } % % & & # # _ _ $ $ backslash \\ lbrack [ rbrack ]
  `),
);

/** Operators with limits above and below them, and those whose limits stand beside them. */
export const LARGE = new Map(
  table("sum ∑ prod ∏ coprod ∐ bigcup ⋃ bigcap ⋂ bigvee ⋁ bigwedge ⋀ bigoplus ⨁ bigotimes ⨂ bigodot ⨀ bigsqcup ⨆"),
);
export const INTEGRALS = new Map(table("int ∫ iint ∬ iiint ∭ oint ∮"));
export const ACCENTS = new Map(
  table(`
  hat ^ widehat ^ bar ¯ overline ¯ vec → overrightarrow → overleftarrow ← dot ˙ ddot ¨ tilde ~ widetilde ~ check ˇ breve ˘
  acute ´ grave \` overbrace ⏞ mathring ˚
  `),
);
export const UNDER = new Map(table("underline _ underbrace ⏟"));

const words = (/** @type {string} */ text) => new Set(text.split(" "));
export const FUNCTIONS = words(
  "sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh coth log ln lg exp arg deg dim hom ker",
);
export const LIMITS = words("lim limsup liminf max min sup inf det gcd Pr argmax argmin");
export const SPACES = new Map(
  table(", 0.17em : 0.22em > 0.22em ; 0.28em ! -0.17em enspace 0.5em quad 1em qquad 2em thinspace 0.17em space 0.25em"),
);
export const SIZES = words("big Big bigg Bigg bigl bigr Bigl Bigr biggl biggr Biggl Biggr bigm Bigm");
/** Commands that have no effect here. */
export const IGNORED = words(
  "displaystyle textstyle scriptstyle limits nolimits nonumber notag hline centering left. allowbreak relax small",
);

/** @type {Record<string, {capital: number, small: number, digit: number, others: string}>} */
const ALPHABETS = {
  bold: { capital: 0x1d400, small: 0x1d41a, digit: 0x1d7ce, others: "" },
  double: { capital: 0x1d538, small: 0x1d552, digit: 0x1d7d8, others: "CℂHℍNℕPℙQℚRℝZℤ" },
  script: { capital: 0x1d49c, small: 0x1d4b6, digit: 0, others: "BℬEℰFℱHℋIℐLℒMℳRℛeℯgℊoℴ" },
  fraktur: { capital: 0x1d504, small: 0x1d51e, digit: 0, others: "CℭHℌIℑRℜZℨ" },
};
/** @type {Map<string, string>} */
export const STYLES = new Map(
  table(`
  mathbf bold boldsymbol bold bm bold textbf bold mathbb double mathds double Bbb double mathcal script mathscr script
  mathfrak fraktur mathrm upright mathit italic mathsf upright mathtt upright
  `),
);

/**
 * A letter or digit in an alphabet; other characters stay.
 *
 * @param {string} character
 * @param {string} style of STYLES
 */
export function styled(character, style) {
  const alphabet = ALPHABETS[style];
  if (alphabet === undefined || !/^[A-Za-z0-9]$/.test(character)) {
    return character;
  }
  const letters = [...alphabet.others];
  const at = letters.indexOf(character);
  if (at !== -1) {
    return letters[at + 1];
  }
  const [base, first] = /[A-Z]/.test(character)
    ? [alphabet.capital, 65]
    : /[a-z]/.test(character)
      ? [alphabet.small, 97]
      : [alphabet.digit, 48];
  return base === 0 ? character : String.fromCodePoint(base + character.charCodeAt(0) - first);
}
