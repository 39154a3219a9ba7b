"""Every message a user can meet, as rows: id, template, explanation, hint.

How to add one: append a row to the section of your room, with the next free number of its range, and use it by id
(`GraphBreak("B012", stack, ...)`, `warn_once("W003", ...)`). The names in braces are the fields the raiser must pass. Ids are stable:
never renumber, never reuse. `docs/errors.md` is generated from this table (`make docs`), and a test compares the two.

- template: one line, lower case, says what happened with the user's names in it.
- explanation: why magneto cannot do better here. May be empty for plain mistakes.
- hint: the edit that mends it; may be empty.

Ranges: B0xx control flow and bytecode (machine), B1xx calls and values (trackers); U0xx public functions,
U1xx flags, U2xx backends; W00x environment and compilers, W01x capture, W1xx graphs, W2xx stores; I0xx base, I2xx graphs.
"""

from __future__ import annotations

from magneto.base.dataclass import dataclass


@dataclass(frozen=True, slots=True)
class ErrorEntry:
    """One row: `template.format(**fields)` is the message."""

    id: str
    template: str
    explanation: str = ""
    hint: str = ""


ROWS: tuple[ErrorEntry, ...] = (
    # ---- B0xx: control flow and bytecode (machine) -------------------------------------------------------------------
    ErrorEntry(
        "B002",
        "unsupported instruction {name}: {reason}",
        "The symbolic interpreter has no rule for this bytecode instruction; CPython executes it between two graphs.",
        "Move the construct out of the optimised function if it runs often.",
    ),
    ErrorEntry(
        "B003",
        "variable {name} has no captured value here",
        "The variable is unbound, or shared with a function in a way that is not followed.",
        "",
    ),
    ErrorEntry(
        "B004",
        "import of {name}, which is not loaded yet",
        "Importing runs the module's own code; once it is loaded, the import statement is captured.",
        "Import it at the top of the file.",
    ),
    ErrorEntry(
        "B011",
        "result of {name} depends on data: {reason}",
        "Its shape or its value depends on the numbers inside a tensor, known only when the program runs.",
        "Masking with torch.where keeps shapes; keep values as tensors where possible.",
    ),
    ErrorEntry(
        "B012",
        "data-dependent branch on {value}",
        "The branch taken depends on numbers inside a tensor, known only when the program runs. Both sides are compiled when first reached.",
        "If both sides are cheap, torch.where(condition, a, b) keeps one graph.",
    ),
    ErrorEntry(
        "B013",
        "result of {name} cannot be computed without running it: {reason}",
        "No shape rule and no meta kernel describes the operation. It runs between two graphs.",
        "",
    ),
    ErrorEntry(
        "B020",
        "calls nested {depth} deep",
        "Calls are inlined up to a depth; recursion without a known end stops there.",
        "Rewrite the recursion as a loop, or call the inner function through magneto.disable.",
    ),
    ErrorEntry(
        "B021",
        "more than {limit} instructions in one region",
        "A region is bounded so that a long loop cannot make one endless compile; capture goes on in the next region.",
        "Compile the loop's body instead of the loop.",
    ),
    ErrorEntry(
        "B022",
        "{value} cannot be rebuilt outside of the graph",
        "A half-consumed iterator or a similar object is alive where the region ends.",
        "",
    ),
    ErrorEntry("B023", "coroutine {name}", "Frames that suspend in async code are left to CPython; what they call is captured.", ""),
    ErrorEntry(
        "B024",
        "an error of magneto's own: {error}",
        "The instruction runs in CPython and capture goes on behind it. Nothing is wrong with the program.",
        "MAGNETO_LOG=1 prints the traceback; please report it.",
    ),
    # ---- B1xx: calls and values (trackers) ---------------------------------------------------------------------------
    ErrorEntry(
        "B101",
        "call of {callee}: {reason}",
        "This callable is not Python code that magneto can follow, and no rule describes it. It is called as usual between two graphs.",
        "If it is a pure function of tensors, magneto.allow_in_graph(fn) keeps it inside the graph.",
    ),
    ErrorEntry(
        "B102",
        "value of a tensor needed in Python: {operation}",
        "The operation turns tensor data into a Python value, which is known only when the program runs.",
        "Keep the value as a tensor where possible.",
    ),
    ErrorEntry(
        "B103", "attribute {attribute!r} of {value} cannot be captured", "The attribute is computed by code that magneto cannot follow.", ""
    ),
    ErrorEntry("B104", "operation {operation} on {value} is not supported", "No rule describes this operation for this kind of value.", ""),
    ErrorEntry(
        "B105",
        "output shape of {operation} depends on data",
        "How many elements the operation returns depends on the numbers in its input.",
        "Masking with torch.where keeps the shape.",
    ),
    ErrorEntry(
        "B106",
        "call of {callee}, which was marked not to be captured",
        "magneto.disable, magneto.disallow_in_graph, torch.compiler.disable or a skipped file says so.",
        "",
    ),
    ErrorEntry(
        "B107",
        "mutation of {value} cannot be replayed: {reason}",
        "A side effect must be applied in order, exactly once; this one cannot be postponed to the end of the graph.",
        "",
    ),
    ErrorEntry(
        "B108",
        "generator or coroutine {value}",
        "Frames that suspend are left to CPython; what they call is captured.",
        "Use a list where laziness is not needed.",
    ),
    ErrorEntry("B109", "tensor subclass or unusual tensor {value}", "Only plain dense tensors and parameters are captured.", ""),
    ErrorEntry(
        "B110",
        "iteration over {value}, whose items are not known",
        "The object was made outside this region by C code, or suspends; its next item is known only when the program asks for it.",
        "A list, or range(), in its place keeps one graph.",
    ),
    ErrorEntry(
        "B111",
        "with-block of {value}, which cannot be followed",
        "Entering or leaving it changes state that capture does not model. The block's body is captured separately.",
        "Enter it outside of the optimised function where possible.",
    ),
    ErrorEntry(
        "B112",
        "{value} becomes a leaf of autograd in this region",
        "requires_grad_() or nn.Parameter() makes a new leaf. A graph records gradients for its inputs only, so operations on the leaf that autograd "
        "records are captured from the next region on, where it is an input.",
        "",
    ),
    ErrorEntry("B113", "graph_break() was called{reason}", "The program asks for a break here.", ""),
    ErrorEntry(
        "B114",
        "a size that depends on data is needed: {reason}",
        "How many elements an operation found (a mask, nonzero, unique) is known only when the program runs, and what happens here depends on it.",
        "",
    ),
    ErrorEntry(
        "B120",
        "{value} may die here, and something waits for that",
        "A weak reference or a finaliser tells when the object dies. The region ends, so that this happens where the program lets go of it.",
        "",
    ),
    # ---- U0xx: public functions --------------------------------------------------------------------------------------
    ErrorEntry("U001", "{function}() expects {expected}, got {got}", "", ""),
    ErrorEntry(
        "U002",
        "unknown backend {name!r}{suggestion}",
        "",
        "magneto.list_backends() shows the names; a callable (GraphModule, example_inputs) -> callable is accepted too.",
    ),
    ErrorEntry("U003", "unknown {what} {name!r}{suggestion}", "", ""),
    ErrorEntry("U005", "backend {name} returned {got}, which is not callable", "", "Return gm.forward, or another callable on the inputs."),
    ErrorEntry("U006", "{function}(): {reason}", "", ""),
    # ---- U1xx: flags -------------------------------------------------------------------------------------------------
    ErrorEntry("U101", "unknown flag {name!r}{suggestion}", "", "docs/flags.md lists all flags."),
    ErrorEntry("U102", "flag {name} expects {expected}, got {got}", "", "docs/flags.md lists all flags."),
    # ---- U2xx: backends ----------------------------------------------------------------------------------------------
    ErrorEntry("U201", "backend {name} is not available: {reason}", "", ""),
    # ---- W0xx: environment, compilers, capture -----------------------------------------------------------------------------
    ErrorEntry(
        "W001",
        "Python {version} is not supported: programs run in eager",
        "Capture knows the frames of CPython 3.11, 3.12 and 3.13.",
        "Use one of these versions.",
    ),
    ErrorEntry(
        "W002",
        "no C compiler found: graphs run in eager",
        "Kernels for the CPU are compiled with the system's C compiler.",
        "Install gcc or clang, or point the flag `compiler` (MAGNETO_COMPILER) to one.",
    ),
    ErrorEntry(
        "W003",
        "the C compiler failed on a kernel, its operations run in eager: {error}",
        "",
        "MAGNETO_DUMP=dir keeps the source of the kernel; please report it.",
    ),
    ErrorEntry(
        "W004",
        "no kernels on this GPU, its graphs run operation by operation: {reason}",
        "Kernels for CUDA devices are compiled by Triton; without it, or where it refuses one, results are the same.",
        "Install the triton that your torch names among its requirements.",
    ),
    ErrorEntry(
        "W005",
        "no memory on the GPU to measure kernels in, a product stays with the library",
        'mode="max-autotune" measures with tensors of its own beside the model\'s.',
        "Compile before the device is full, or use the default mode.",
    ),
    ErrorEntry(
        "W006",
        "a process that compiles kernels for the GPU has ended before it was done, this process compiles them itself",
        "Triton runs in processes beside the program's; somebody, or the system for want of memory, has ended one.",
        "The flag `compile_workers` (MAGNETO_COMPILE_WORKERS) says how many there are; with 1 there are none.",
    ),
    ErrorEntry(
        "W007",
        "this torch draws random numbers on the GPU in another order than expected, dropout stays with the library",
        "Kernels draw what eager draws, which is compared once in a process; numbers are eager's either way.",
        "Please report it, with the versions of torch and CUDA and the name of the GPU.",
    ),
    ErrorEntry(
        "W010",
        "internal error while capturing {code} ({file}:{line}), it runs in eager: {error}",
        "",
        "MAGNETO_LOG=1 prints the traceback; please report it. MAGNETO_SUPPRESS_ERRORS=0 raises instead.",
    ),
    ErrorEntry(
        "W015",
        "internal error while capturing {code} ({where}), a graph break there: {error}",
        "",
        "MAGNETO_LOG=1 prints the traceback; please report it. MAGNETO_SUPPRESS_ERRORS=0 raises instead.",
    ),
    ErrorEntry(
        "W011",
        "recompile limit ({limit}) reached for {code} ({file}:{line}), further variants run in eager; last miss: {reason}",
        "",
        "MAGNETO_RECOMPILE_LIMIT raises the limit.",
    ),
    ErrorEntry("W012", "backend {backend} failed, the graph runs in eager: {error}", "", "nopython=True raises the backend's own error."),
    # ---- W1xx: graphs -------------------------------------------------------------------------------------------------
    ErrorEntry(
        "W104",
        "graph {graph} runs in eager: {reason}",
        "The compiler could not take this graph as a whole; its operations run as in eager, results are the same.",
    ),
    ErrorEntry(
        "W105",
        "backward of graph {graph} runs in eager: {reason}",
        "The compiler could not take the backward graph; PyTorch's own autograd computes the gradients.",
    ),
    # ---- W2xx: stores ------------------------------------------------------------------------------------------------
    ErrorEntry(
        "W201", "cache entry {path} is damaged and was ignored: {error}", "", "python -m magneto cache --clear removes the whole cache."
    ),
    ErrorEntry("W202", "cache directory {path} cannot be used ({error}): nothing is kept on disk", "", "Set MAGNETO_CACHE_DIR."),
    # ---- I0xx: base --------------------------------------------------------------------------------------------------
    ErrorEntry("I001", "{what}", "An invariant of magneto itself does not hold.", "Please report it."),
    ErrorEntry("I002", "pass {name} produced an invalid program: {error}", "", "Please report it."),
    # ---- I2xx: graphs ------------------------------------------------------------------------------------------------
    ErrorEntry(
        "I202",
        "the graph is not compiled as a whole: {reason}",
        "Something in it has no functional form; its operations run as in eager, results are the same.",
        "",
    ),
)

CATALOGUE: dict[str, ErrorEntry] = {row.id: row for row in ROWS}
