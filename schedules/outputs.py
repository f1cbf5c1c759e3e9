"""A declaration with some of its outputs only: what they do not need goes away, so that one text serves whoever wants less of it."""
import tvm_ffi
from tvm import tirx
from tvm.s_tir.stmt import SBlock, SBlockRealize


def only(func, *outputs):
    """The function without the parameters that it writes, but those of these names, and without the blocks that none of these depends on;
    other parameters stay, needed or not.

    A block is needed where it writes what is needed, and then so is all that it reads. Tensors are told by their names.
    """
    blocks = []
    tvm_ffi.structural_walk(func.body, (SBlock, lambda block: blocks.append(block) if not _inside(block) else None))
    pairs = [(_names(block.writes), _names(block.reads)) for block in blocks]
    needed, before = set(outputs), None
    while before != needed:
        before, needed = needed, needed.union(*(reads for writes, reads in pairs if writes & needed))
    made = set().union(*(writes for writes, _ in pairs))
    dead = made - needed

    def without(block):
        inner = _inside(block)
        if not inner:
            return block
        read = _names(*(it.reads for it in inner))
        reads = [region for region in block.reads if region.source.name in read or region.source.name not in made]
        writes = [region for region in block.writes if region.source.name not in dead]
        kept = [buffer for buffer in block.alloc_buffers if buffer.name not in dead]
        return SBlock(block.iter_vars, reads, writes, block.name_hint, block.body, block.init, kept, block.match_buffers, block.annotations)

    def realized(realize):
        block = realize.block
        gone = not _inside(block) and _names(block.writes) <= dead or _is_nothing(block.body)
        return tirx.Evaluate(0) if gone else realize

    def sequence(statements):
        left = [stmt for stmt in statements.seq if not _is_nothing(stmt)]
        return left[0] if len(left) == 1 else tirx.SeqStmt(left) if left else tirx.Evaluate(0)

    body = tvm_ffi.structural_map(func.body, ((SBlock, without), (SBlockRealize, realized), (tirx.SeqStmt, sequence),
                                  (tirx.For, lambda loop: loop.body if _is_nothing(loop.body) else loop)))
    return tirx.PrimFunc([param for param in func.params if param.name not in dead], body, func.ret_type, func.attrs)


def _names(*lists):
    return {region.source.name for regions in lists for region in regions}


def _inside(block):
    """Blocks inside a block."""
    inner = []
    tvm_ffi.structural_walk(block.body, (SBlock, inner.append))
    return inner


def _is_nothing(stmt):
    return isinstance(stmt, tirx.Evaluate) and isinstance(stmt.value, tirx.IntImm)
