// @ts-check
/** What the scanner of highlight.js knows of each language: a pattern with a named group for each colour, and keywords. */

/** @typedef {{pattern: RegExp, keywords: (word: string) => boolean}} Language */

// Each piece takes linear time: its alternatives begin with different characters, and what is not closed ends the text.
const DOUBLE = '"(?:[^"\\\\\\n]|\\\\[^])*"?';
const SINGLE = "'(?:[^'\\\\\\n]|\\\\[^])*'?";
const BACKTICK = "`(?:[^`\\\\]|\\\\[^])*`?";
const TRIPLE = '"""[^]*?(?:"""|$)|\'\'\'[^]*?(?:\'\'\'|$)';
const BLOCK_COMMENT = "/\\*[^]*?(?:\\*/|$)";
const NUMBER = "(?<number>\\b(?:0[xXbBoO][\\da-fA-F_]+|\\d[\\d_]*(?:\\.\\d+)?(?:[eE][+-]?\\d+)?)\\w*)";
const WORD = "(?<word>[A-Za-z_$][\\w$]*)";

const C_LIKE = [`(?<comment>//[^\\n]*|${BLOCK_COMMENT})`, `(?<string>${DOUBLE}|${SINGLE})`, NUMBER, WORD];
const SCRIPT = [`(?<comment>//[^\\n]*|${BLOCK_COMMENT})`, `(?<string>${DOUBLE}|${SINGLE}|${BACKTICK})`, NUMBER, WORD];
const HASHED = ["(?<comment>#[^\\n]*)", `(?<string>${TRIPLE}|${DOUBLE}|${SINGLE})`, NUMBER, WORD];
const SHELL = [
  "(?<comment>(?<![^\\s])#[^\\n]*)",
  `(?<string>${DOUBLE}|'[^']*'?)`,
  "(?<property>\\$(?:\\w+|\\{[^}\\n]*\\}?|[@#?*!$]))",
  "(?<number>(?<![\\w.-])\\d+(?![\\w.-]))",
  "(?<word>(?<![\\w./-])[a-z]\\w*(?![\\w./-]))",
];
const SQL = [`(?<comment>--[^\\n]*|${BLOCK_COMMENT})`, "(?<string>'(?:[^']|'')*'?)", NUMBER, WORD];
const JSON_PARTS = [`(?<comment>//[^\\n]*)`, `(?<property>"(?:[^"\\\\\\n]|\\\\.)*"(?=\\s*:))`, `(?<string>${DOUBLE})`, NUMBER, WORD];
const YAML = [
  "(?<comment>(?<![^\\s])#[^\\n]*)",
  "(?<property>^(?: |- )*[\\w./][\\w./-]*(?=:(?:\\s|$)))",
  `(?<string>${DOUBLE}|(?<![\\w])${SINGLE})`,
  "(?<number>(?<=[:,[] ?|- )-?\\d[\\d.]*(?=[\\s,\\]]|$))",
  WORD,
];
const CSS = [
  `(?<comment>${BLOCK_COMMENT})`,
  `(?<string>${DOUBLE}|${SINGLE})`,
  "(?<keyword>@[\\w-]+)",
  "(?<property>(?<=[{;\\s])[a-z-]+(?=\\s*:\\s))",
  "(?<number>#[\\da-fA-F]{3,8}\\b|(?<![\\w-])-?\\d[\\d.]*[a-z%]*)",
  "(?<call>(?<![\\w-])[\\w-]+(?=\\())",
];
const MARKUP = [
  "(?<comment><!--[^]*?(?:-->|$))",
  "(?<keyword></?[A-Za-z][\\w:.-]*|(?<=[\\w\"'\\s])/?>)",
  "(?<property>(?<=\\s)[\\w:@.-]+(?==[\"']))",
  `(?<string>(?<==)"[^"]*"?|(?<==)'[^']*'?)`,
];
const DIFF = ["(?<comment>^(?:@@|diff |index |---|\\+\\+\\+)[^\\n]*)", "(?<string>^\\+[^\\n]*)", "(?<removed>^-[^\\n]*)"];

const OF_C = "break case char const continue default do double else enum extern float for goto if inline int long register return short signed sizeof static struct switch typedef union unsigned void volatile while bool true false NULL nullptr";
const OF_CPP = `${OF_C} auto catch class constexpr delete explicit friend mutable namespace new noexcept operator override private protected public template this throw try typename using virtual std`;
const OF_JAVA = "abstract boolean break byte case catch char class const continue default do double else enum extends final finally float for if implements import instanceof int interface long new null package private protected public record return sealed short static super switch synchronized this throw throws true false try var void volatile while yield string using namespace async await object override readonly internal foreach in out ref get set fun val when is as data companion suspend";
const OF_SCRIPT = "abstract any as async await boolean break case catch class const continue debugger declare default delete do else enum export extends false finally for from function get if implements import in instanceof interface keyof let namespace never new null number of private protected public readonly return set static string super switch this throw true try type typeof undefined unknown var void while with yield";
const OF_PYTHON = "and as assert async await break case class continue def del elif else except False finally for from global if import in is lambda match None nonlocal not or pass raise return self True try while with yield";
const OF_RUBY = "alias and begin break case class def defined do else elsif end ensure false for if in module next nil not or puts raise redo require rescue retry return self super then true undef unless until when while yield local function repeat library NULL TRUE FALSE";
const OF_GO = "break case chan const continue default defer else fallthrough false for func go goto if import interface map nil package range return select struct switch true type var bool byte error float32 float64 int int8 int16 int32 int64 rune string uint uint8 uint32 uint64 any make append len";
const OF_RUST = "as async await bool break char const continue crate dyn else enum extern f32 f64 false fn for i8 i16 i32 i64 if impl in let loop match mod move mut pub ref return Self self static str String struct super trait true type u8 u16 u32 u64 unsafe use usize where while func guard protocol extension init nil var class switch case default import override throws try";
const OF_PHP = "abstract and array as break case catch class const continue default do echo else elseif extends false final finally fn for foreach function global if implements interface namespace new null or private protected public return static switch throw trait true try use var while";
const OF_SHELL = "alias case do done echo elif else esac eval exec exit export fi for function if in local read return set shift source sudo then trap unset until while cd";
const OF_SQL = "add all alter and as asc between by case check column constraint create cross date decimal default delete desc distinct drop else end exists foreign from full group having in index inner insert int integer into is join key left like limit not null offset on or order outer over partition primary references right select set table text then union unique update values varchar view when where with";
const OF_DATA = "true false null yes no True False on off";

/** @type {[string, string[], string][]} names of a language, its pieces, its keywords */
const TABLE = [
  ["python py py3 python3 ipython", HASHED, OF_PYTHON],
  ["ruby rb r lua perl pl elixir julia", HASHED, OF_RUBY],
  ["toml ini conf dockerfile makefile make cmake properties env nginx", HASHED, `${OF_DATA} FROM RUN COPY CMD ENV WORKDIR EXPOSE ENTRYPOINT ARG`],
  ["javascript js jsx mjs typescript ts tsx", SCRIPT, OF_SCRIPT],
  ["go golang", SCRIPT, OF_GO],
  ["c h", C_LIKE, OF_C],
  ["cpp c++ cc hpp cuda cu glsl", C_LIKE, OF_CPP],
  ["java kotlin kt csharp cs c# scala dart groovy", C_LIKE, OF_JAVA],
  ["rust rs swift zig", [C_LIKE[0], `(?<string>${DOUBLE}|'(?:[^'\\\\\\n]|\\\\.)')`, NUMBER, WORD], OF_RUST],
  ["php", SCRIPT, OF_PHP],
  ["bash sh shell zsh console fish powershell", SHELL, OF_SHELL],
  ["sql mysql postgresql postgres sqlite plsql", SQL, OF_SQL],
  ["json json5 jsonc jsonl", JSON_PARTS, OF_DATA],
  ["yaml yml", YAML, OF_DATA],
  ["css scss less", CSS, ""],
  ["html xml svg xhtml vue", MARKUP, ""],
  ["diff patch", DIFF, ""],
];
/** @type {Map<string, Language>} */
const made = new Map(); // by name: a pattern is made when its language is first shown

/**
 * @param {string} name
 * @returns {Language | null}
 */
export function languageOf(name) {
  const key = name.toLowerCase();
  const row = TABLE.find(([names]) => names.split(" ").includes(key));
  if (row === undefined) {
    return null;
  }
  const language = made.get(key) ?? makeLanguage(row);
  made.set(key, language);
  return language;
}

/** @param {[string, string[], string]} row @returns {Language} */
function makeLanguage([, pieces, words]) {
  const keywords = new Set(words.split(" "));
  const ignoresCase = pieces === SQL;
  return {
    pattern: new RegExp(pieces.join("|"), "gm"),
    keywords: (word) => keywords.has(ignoresCase ? word.toLowerCase() : word),
  };
}
