"""Object code of a loop, from the LLVM IR that numba made and optimized of it.

To numba's module are linked an entry that takes slots (native.py says of what), and what numba's runtime
would be asked for: memory for scratch arrays, and the strides of a reshaped one. The loops need no
more of it, and no Python. Arrays come without an owner, so that none is counted.

That numba passes arguments and lays out its arrays as it did is looked at, not assumed: where anything
differs, or the loop needs anything else, this raises NotNative, and numba runs the loop itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from qconvert.compiled.native import DECLINED, DONE, ENTRY, IMPORTS, Argument

# An allocation: numba's header (`_meminfo_struct_type` of its nrtdynmod.py), of which generated code
# counts in the first word and reads the data's address from the fourth; then the data, aligned.
_RUNTIME = """
declare ptr @malloc(i64)
declare void @free(ptr)
declare i64 @llvm.umax.i64(i64, i64)

define ptr @NRT_MemInfo_alloc_aligned(i64 %size, i32 %align) {
  %asked = zext i32 %align to i64
  %wide = call i64 @llvm.umax.i64(i64 %asked, i64 64)
  %more = add i64 %wide, 48
  %total = add i64 %size, %more
  %made = call ptr @malloc(i64 %total)
  %failed = icmp eq ptr %made, null
  br i1 %failed, label %end, label %fill
fill:
  store i64 1, ptr %made
  %start = ptrtoint ptr %made to i64
  %above = add i64 %start, %more
  %mask = sub i64 0, %wide
  %aligned = and i64 %above, %mask
  %data = inttoptr i64 %aligned to ptr
  %field = getelementptr i64, ptr %made, i64 3
  store ptr %data, ptr %field
  br label %end
end:
  ret ptr %made
}

define void @NRT_MemInfo_call_dtor(ptr %made) {
  call void @free(ptr %made)
  ret void
}

; All arrays are in C order, and numba has compared the sizes.
define i32 @numba_attempt_nocopy_reshape(i64 %nd, ptr %dims, ptr %strides, i64 %newnd, ptr %newdims,
                                         ptr %newstrides, i64 %itemsize, i32 %fortran) {
begin:
  br label %next
next:
  %left = phi i64 [ %newnd, %begin ], [ %at, %step ]
  %stride = phi i64 [ %itemsize, %begin ], [ %larger, %step ]
  %more = icmp sgt i64 %left, 0
  br i1 %more, label %step, label %end
step:
  %at = sub i64 %left, 1
  %to = getelementptr i64, ptr %newstrides, i64 %at
  store i64 %stride, ptr %to
  %from = getelementptr i64, ptr %newdims, i64 %at
  %dim = load i64, ptr %from
  %larger = mul i64 %stride, %dim
  br label %next
end:
  ret i32 1
}
"""
# Of numpy's PyArrayInterface: where pointers to shape and data lie.
_SHAPE_AT, _DATA_AT = 24, 40
_MEMINFO = "{i64, i8*, i8*, i8*, i64}"
_ARRAY = ("meminfo", "parent", "nitems", "itemsize", "data", "shape", "strides")
_SCALARS = {"int": "i64", "float": "float", "double": "double", "bool": "i8"}


class NotNative(Exception):
    """The loop cannot be run without numba; says why."""


def object_code(made: Any, arguments: Sequence[Argument]) -> bytes:
    """Of a compile result of numba's."""
    import llvmlite.binding as llvm

    _look_at_layouts()
    name = made.fndesc.llvm_func_name
    module = llvm.parse_assembly(made.library.get_llvm_str())
    found = [str(one.type) for one in module.get_function(name).arguments]
    if found != [*_passed(arguments)]:
        raise NotNative(f"numba passes arguments as {found}; expected {[*_passed(arguments)]}")
    module.link_in(llvm.parse_assembly(f"{entry(name, arguments)}\n{_RUNTIME}"))
    for one in [*module.functions, *module.global_variables]:
        if not one.is_declaration and one.name != ENTRY:
            one.linkage = llvm.Linkage.internal
    machine = _machine()
    passes = llvm.create_new_module_pass_manager()
    passes.add_global_dead_code_eliminate_pass()
    passes.run(module, llvm.create_pass_builder(machine, llvm.create_pipeline_tuning_options()))
    module.verify()
    asked = {one.name for one in module.functions if one.is_declaration}
    asked |= {one.name for one in module.global_variables if one.is_declaration}
    unknown = sorted(one for one in asked - {*IMPORTS} if not one.startswith("llvm."))
    if unknown:
        raise NotNative(f"it needs {', '.join(unknown)} of numba's runtime; expected nothing else")
    code: bytes = machine.emit_object(module)
    return code


def _look_at_layouts() -> None:
    import numba
    from numba.core import datamodel
    from numba.core.runtime import nrtdynmod

    header = str(nrtdynmod._meminfo_struct_type)
    model = vars(datamodel)["default_manager"][numba.types.Array(numba.float32, 1, "C")]
    array = tuple(model._fields)
    if (header, array) != (_MEMINFO, _ARRAY):
        raise NotNative(
            f"numba lays out arrays as {header}, {array}; expected {_MEMINFO}, {_ARRAY}"
        )


def _machine() -> Any:
    """LLVM's target machine as numba's JIT has it."""
    import llvmlite.binding as llvm
    from numba.core import config
    from numba.core.registry import cpu_target

    triple, cpu, features = cpu_target.target_context.codegen().magic_tuple()
    reloc = "static" if triple.startswith(("x86", "i386", "i686")) else "default"
    return llvm.Target.from_triple(triple).create_target_machine(
        cpu=cpu, features=features, opt=vars(config)["OPT"], reloc=reloc, codemodel="jitdefault",
        jit=True,
    )  # fmt: skip


def _passed(arguments: Sequence[Argument]) -> Iterator[str]:
    """The types of what numba passes: where to put result and error, then arguments, arrays by parts."""
    yield from ("ptr", "ptr")
    for one in arguments:
        if one.is_array:
            yield from ("ptr", "ptr", "i64", "i64", "ptr", *["i64"] * (2 * one.dimensions))
        else:
            yield _SCALARS[one.text]


def entry(name: str, arguments: Sequence[Argument]) -> str:
    """IR of the function that takes slots and calls numba's of this name."""
    lines: list[str] = []
    values = ["%result", "%error"]
    for number, one in enumerate(arguments):
        part = f"%a{number}"
        lines.append(f"{part}.at = getelementptr i64, ptr %slots, i64 {number}")
        lines += _array(one, part, values) if one.is_array else _scalar(one.text, part, values)
    types = _passed(arguments)
    passed = ", ".join(f"{kind} {value}" for kind, value in zip(types, values, strict=True))
    declared = ", ".join(_passed(arguments))
    body = "\n  ".join(lines)
    return f"""
declare i32 @"{name}"({declared})

define i32 @{ENTRY}(ptr %slots) {{
  %result = alloca i8
  %error = alloca ptr
  store i8 0, ptr %result
  {body}
  %status = call i32 @"{name}"({passed})
  %made = load i8, ptr %result
  %said = icmp ne i8 %made, 0
  %answer = select i1 %said, i32 {DONE}, i32 {DECLINED}
  %well = icmp eq i32 %status, 0
  %returned = select i1 %well, i32 %answer, i32 -1
  ret i32 %returned
}}
"""


def _array(one: Argument, part: str, values: list[str]) -> Iterator[str]:
    """An array without owner and parent: its number of items, their size, address, shape, strides."""
    yield f"{part} = load ptr, ptr {part}.at, align 1"
    yield f"{part}.sizes.at = getelementptr i8, ptr {part}, i64 {_SHAPE_AT}"
    yield f"{part}.sizes = load ptr, ptr {part}.sizes.at"
    yield f"{part}.data.at = getelementptr i8, ptr {part}, i64 {_DATA_AT}"
    yield f"{part}.data = load ptr, ptr {part}.data.at"
    shape = [f"{part}.{dimension}" for dimension in range(one.dimensions)]
    for dimension, size in enumerate(shape):
        yield f"{size}.at = getelementptr i64, ptr {part}.sizes, i64 {dimension}"
        yield f"{size} = load i64, ptr {size}.at"
    strides: list[str] = []
    stride = item = one.item[1:]
    for size in reversed(shape):
        strides.insert(0, stride)
        yield f"{size}.all = mul i64 {stride}, {size}"
        stride = f"{size}.all"
    yield f"{part}.items = udiv i64 {stride}, {item}"
    values += ["null", "null", f"{part}.items", item, f"{part}.data", *shape, *strides]


def _scalar(kind: str, part: str, values: list[str]) -> Iterator[str]:
    loaded = "double" if kind in ("float", "double") else "i64"
    yield f"{part} = load {loaded}, ptr {part}.at, align 1"
    if kind == "float":
        yield f"{part}.short = fptrunc double {part} to float"
        values.append(f"{part}.short")
    elif kind == "bool":
        yield f"{part}.byte = trunc i64 {part} to i8"
        values.append(f"{part}.byte")
    else:
        values.append(part)
