/* A call of attention from a Relax graph: the inputs first, then the outputs, as R.call_dps_packed hands them over. Compiled once for each
 * workload of a graph, as the artefact's entry.c is, whose checks and choice among variants it shares and whose functions it keeps to
 * itself; FLASHTIR_CALL_FROM_GRAPH is the symbol of this one. */
#include <tvm/ffi/c_api.h>
#undef TVM_FFI_DLL_EXPORT
#define TVM_FFI_DLL_EXPORT __attribute__((unused)) static
#include "entry.c"

/* In a graph `layout` stands behind the other inputs; its bit i says that tensor i of q, k, v and out lies as [B,H,N,D]. */
enum { OUTPUTS = 2, INPUTS = ARGUMENTS - OUTPUTS, LAYOUT = INPUTS, IN_GRAPH = ARGUMENTS + 1, AXES = 4 };

typedef struct {
  DLTensor tensor;
  int64_t shape[AXES], strides[AXES];
} Seen;

/* The argument as the entry wants it: rows before heads, and for packed sequences no batch axis. What is no tensor of four axes stays as it
 * is; the entry has a sentence for it. */
static TVMFFIAny seen_as(TVMFFIAny arg, bool heads_first, Seen *seen) {
  const DLTensor *tensor = as_tensor(&arg);
  if (tensor == NULL || tensor->ndim != AXES) return arg;
  int64_t compact = 1;
  for (int axis = AXES - 1; axis >= 0; compact *= tensor->shape[axis--]) {
    int place = heads_first && (axis == 1 || axis == 2) ? 3 - axis : axis;
    seen->shape[place] = tensor->shape[axis];
    seen->strides[place] = tensor->strides ? tensor->strides[axis] : compact;
  }
  seen->tensor = *tensor;
  seen->tensor.ndim = AXES - (FLASHTIR_LENGTHS == PACKED);
  seen->tensor.shape = seen->shape + (FLASHTIR_LENGTHS == PACKED);
  seen->tensor.strides = seen->strides + (FLASHTIR_LENGTHS == PACKED);
  return (TVMFFIAny){.type_index = kTVMFFIDLTensorPtr, .v_ptr = &seen->tensor};
}

/* In a graph whole numbers may be tensors of one element, which are read behind what their stream was given before. */
static int as_integer(TVMFFIAny *arg) {
  const DLTensor *tensor = as_tensor(arg);
  if (tensor == NULL) return 0;
  int64_t one = 1;
  int32_t number;
  DLTensor plain = *tensor;
  if (plain.dtype.code != kDLInt || plain.dtype.bits != 32 || plain.ndim > 1 || (plain.ndim == 1 && plain.shape[0] != 1))
    return fail("TypeError", "%s is a tensor, wanted one of a single int32", kIntegers[0]);
  plain.data = (char *)plain.data + plain.byte_offset;
  plain.byte_offset = 0, plain.ndim = 1, plain.shape = &one, plain.strides = NULL;
  if (read_table(&plain, &number)) return -1;
  *arg = (TVMFFIAny){.type_index = kTVMFFIInt, .v_int64 = number};
  return 0;
}

/* name(q, k, v, scale, extras, tables, integers, layout, out, lse) -> None */
__attribute__((visibility("default"))) int FLASHTIR_CALL_FROM_GRAPH(void *self, const TVMFFIAny *args, int32_t count, TVMFFIAny *result) {
  Seen seen[LSE];
  TVMFFIAny given[ARGUMENTS];
  if (count != IN_GRAPH || args[LAYOUT].type_index != kTVMFFIInt)
    return fail("TypeError", "a graph's call has %d arguments, wanted %d with the layout before the outputs: compile the graph anew",
                (int)count, (int)IN_GRAPH);
  memcpy(given, args, OUT * sizeof *args);
  memcpy(given + OUT, args + IN_GRAPH - OUTPUTS, OUTPUTS * sizeof *args);
  memcpy(given + SCALE, args + OUT, (INPUTS - OUT) * sizeof *args);
  for (int i = Q; i <= OUT; ++i) given[i] = seen_as(given[i], args[LAYOUT].v_int64 >> i & 1, &seen[i]);
  for (int i = ARGUMENTS - INTEGERS; i < ARGUMENTS; ++i)
    if (as_integer(&given[i])) return -1;
  return forward(self, given, ARGUMENTS, result, NULL);
}
