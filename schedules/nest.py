"""A scheduled function as a picture: its loops and blocks as indented text, or the lines of it that lead to some blocks."""
from tvm import tirx


def loop_nest(sch):
    """The scheduled function as an indented text: loops with extent and binding, blocks with their name, in program order.

    An innermost block is followed by the shape of the buffer that it writes, with its scope where that is not global, unless the buffer is
    an argument of the function.
    """
    func, lines, blocks = sch.mod["main"], [], []
    arguments = {buffer.name for buffer in func.params if isinstance(buffer, tirx.Buffer)}

    def visit(stmt, depth):
        kind = type(stmt).__name__
        if kind == "For":
            bound = f"  @{stmt.thread_binding.thread_tag}" if stmt.thread_binding is not None else ""
            loop_kind = {1: "  parallel", 2: "  vectorized", 3: "  unrolled"}.get(int(stmt.kind), "")
            lines.append(f"{'  ' * depth}{stmt.loop_var.name} in {_size(stmt.extent)}{bound or loop_kind}")
            visit(stmt.body, depth + 1)
        elif kind == "SBlockRealize":
            block = stmt.block
            if block.name_hint == "root":
                return visit(block.body, depth)
            blocks.append(block)
            line = len(lines)
            lines.append("  " * depth + block.name_hint)
            visit(block.body, depth + 1)
            buffer = block.writes[0].source if block.writes else None
            if blocks[-1] is block and buffer is not None and buffer.name not in arguments:
                scope = "" if buffer.scope() == "global" else " " + buffer.scope()
                lines[line] += f"  [{', '.join(map(_size, buffer.shape))}]{scope}"
        elif kind == "SeqStmt":
            for part in stmt.seq:
                visit(part, depth)
        elif kind == "IfThenElse":
            visit(stmt.then_case, depth)

    visit(func.body, 0)
    return "\n".join(lines)


def excerpt(nest, blocks):
    """The lines of a loop nest that lead to some blocks, from the innermost block that holds them all; "..." stands for what is left out.

    nest    text of `loop_nest`
    blocks  names of blocks that it has
    """
    lines, path, paths = nest.splitlines(), [], {}
    for number, line in enumerate(lines):
        path = [n for n in path if _depth(lines[n]) < _depth(line)] + [number]
        if not _is_loop(line):
            paths.setdefault(line.split()[0], path)
    wanted = [paths[block] for block in blocks]
    holders = [n for n in wanted[0][:-1] if not _is_loop(lines[n]) and all(n in path for path in wanted)]
    kept = sorted({n for path in wanted for n in path if n >= max(holders, default=0)})
    margin = _depth(lines[kept[0]])
    picture = []
    for before, number in zip([kept[0] - 1, *kept], kept):
        if number != before + 1:
            picture.append(" " * (_depth(lines[number]) - margin) + "...")
        picture.append(lines[number][margin:])
    return "\n".join(picture)


def pictured_blocks(picture):
    """Names of the innermost blocks of an excerpt: with these `excerpt` draws the same picture."""
    lines = [line for line in picture.splitlines() if line.strip() != "..."]
    return [line.split()[0] for line, following in zip(lines, [*lines[1:], ""])
            if not _is_loop(line) and _depth(following) <= _depth(line)]


def _size(expr):
    """A constant as text; "..." for a size that is known at run time only."""
    return str(expr) if isinstance(expr, tirx.IntImm) else "..."


def _depth(line):
    return len(line) - len(line.lstrip())


def _is_loop(line):
    return " in " in line
