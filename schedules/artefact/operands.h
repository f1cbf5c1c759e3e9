/* Gradients of tensors behind the scale: outputs that a call may ask for. A part of backward.c, whose functions it calls. */

/* An output of this kind: like its operand, and with an axis in front for the number of parts. */
typedef struct {
  bool given;
  DLTensor plain;
  int64_t span, shape[MAX_RANK + 1];
} Output;

/* The output shares no memory with a tensor of the call. */
static int check_operand_apart(const char *name, const DLTensor *plain, int64_t span, const Call *call, const TVMFFIAny *dlse) {
  for (int i = 0; i < TENSORS + EXTRAS; ++i)
    if (meet(plain, span, &call->plain[i], call->views[i].span))
      return fail_apart(name, i < TENSORS ? kWanted[i].name : kExtras[i - TENSORS].name);
  for (int i = 0; i < TABLES; ++i)
    if (meet(plain, span, &call->tables[i], call->tables[i].shape[0])) return fail_apart(name, kTables[i]);
  if (dlse->type_index != kTVMFFINone && meet(plain, span, dlse->v_ptr, call->views[LSE].span)) return fail_apart(name, "dlse");
  return 0;
}

/* Check one of them, in the order of kOperands: None, or a tensor like its operand. */
static int check_operand_gradient(int number, const TVMFFIAny *arg, const Call *call, const TVMFFIAny *dlse, Output outputs[OPERANDS + 1]) {
  const char *name = kOperands[number].name;
  const Extra *extra = &kExtras[kOperands[number].extra];
  const DLTensor *tensor = as_tensor(arg), *operand = &call->plain[TENSORS + kOperands[number].extra];
  const Wanted wanted = {name, extra->axes, extra->dtype, (int)strlen(extra->axes), {FREE, FREE, FREE, FREE}, true};
  Output *output = &outputs[number];
  View view;
  if (arg->type_index == kTVMFFINone) return 0;
  if (tensor == NULL) return fail("TypeError", "%s is %s, wanted a tensor or None", name, type_name(arg));
  if (check_type(&wanted, tensor, operand->device)) return -1;
  for (int axis = 0; axis < wanted.rank; ++axis)
    if (tensor->shape[axis] != operand->shape[axis])
      return fail("ValueError", "%s.shape[%d] is %lld, wanted %lld as %s.shape[%d]", name, axis, (long long)tensor->shape[axis],
                  (long long)operand->shape[axis], extra->name, axis);
  if (check_strides(&wanted, tensor, &view)) return -1;
  *output = (Output){true, *tensor, view.span, {1}};
  output->plain.data = (char *)tensor->data + tensor->byte_offset;
  output->plain.byte_offset = 0, output->plain.strides = NULL, output->plain.ndim = wanted.rank + 1;
  memcpy(output->shape + 1, operand->shape, wanted.rank * sizeof *output->shape);
  output->plain.shape = output->shape;
  if (view.span && output->plain.data == NULL) return fail("ValueError", "%s has no data, wanted a pointer to its elements", name);
  for (int other = 0; other < number; ++other)
    if (outputs[other].given && meet(&output->plain, view.span, &outputs[other].plain, outputs[other].span))
      return fail_apart(name, kOperands[other].name);
  return check_operand_apart(name, &output->plain, view.span, call, dlse);
}

/* Memory of an output with elements; NULL where there is none. */
static void *memory_of_outputs(const Call *call, const Output operands[OPERANDS + 1]) {
  for (int i = FIRST_OUTPUT; i < TENSORS; ++i)
    if (call->views[i].span) return call->plain[i].data;
  for (int i = 0; i < OPERANDS; ++i)
    if (operands[i].given && operands[i].span) return operands[i].plain.data;
  return NULL;
}

/* In how many parts a gradient is summed: enough for all blocks, and no more than an owner of elements has rows of tiles. */
static int64_t parts_of(const Call *call, const char *axes, const int64_t *sizes) {
  static const char letters[] = "BHNM";
  const Variant *variant = call->variant;
  const int64_t tiles[] = {1, 1, variant->operand_rows, variant->operand_keys};
  const int64_t all[] = {call->batch, call->plain[Q].shape[2], call->longest[0], 1};
  int64_t owners = 1, turns = 1;
  for (int axis = 0; letters[axis]; ++axis) {
    const char *found = strchr(axes, letters[axis]);
    int64_t size = found ? sizes[found - axes] : 1;
    owners *= (size + tiles[axis] - 1) / tiles[axis];
    turns *= size == 1 ? (all[axis] + tiles[axis] - 1) / tiles[axis] : 1;
  }
  int64_t parts = (variant->operand_blocks + owners - 1) / owners;
  return parts < turns ? parts : turns > 1 ? turns : 1;
}

/* The kernels of one of them, where it is asked for: one for all of it, or one for parts, in memory of the call's own, and one that adds
 * these up. Without queries or keys it is zero, and so the kernels find. */
static int launch_operand(void *self, const Call *call, int number, Output *output, const TVMFFIAny *delta, TVMFFIAny *result) {
  const TVMFFIAny *it = call->checked;
  Function first = GRADIENTS_OF_OPERANDS + number * FOR_AN_OPERAND;
  if (!output->given || output->span == 0) return 0;
  TVMFFIAny own[] = {it[DOUT], it[Q], it[K], it[V], it[LSE], *delta, {.type_index = kTVMFFIDLTensorPtr, .v_ptr = &output->plain}};
  if (call->variant->functions[first + FOLD] == NULL) return invoke(self, call, first + WHOLE, own + 4, 3, BEHIND, result);
  int64_t parts = parts_of(call, kExtras[kOperands[number].extra].axes, output->shape + 1);
  if (parts == 1) return invoke(self, call, first + WHOLE, own, 7, BEHIND, result);

  Workspace RELEASED sums = {.plain = output->plain};
  int64_t shape[MAX_RANK + 1], flat[] = {parts, output->span};
  memcpy(shape, output->shape, sizeof shape);
  shape[0] = parts, sums.plain.shape = shape, sums.plain.dtype = call->plain[LSE].dtype;
  if (allocate(&sums, kOperands[number].name)) return -1;
  own[6] = sums.argument;
  if (invoke(self, call, first + IN_PARTS, own, 7, BEHIND, result)) return -1;
  DLTensor flat_sums = sums.plain, whole = output->plain;
  flat_sums.shape = flat, flat_sums.ndim = 2, whole.shape = flat + 1, whole.ndim = 1;
  const TVMFFIAny folded[] = {{.type_index = kTVMFFIDLTensorPtr, .v_ptr = &flat_sums}, {.type_index = kTVMFFIDLTensorPtr, .v_ptr = &whole}};
  return invoke(self, call, first + FOLD, folded, 2, 0, result);
}
