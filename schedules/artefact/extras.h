/* The arguments behind scale: those of mask, score modification and sink. What they may be, and the checks of them. */
/* Counts are numbers of keys. Beyond all lengths they mean the same whatever they are; kernels add them to rows, in 32 bits. */
static int check_count(const Extra *extra, const TVMFFIAny *arg, TVMFFIAny *checked, const DLTensor tensors[TENSORS]) {
  enum { TILE = 1024 }; /* more rows than a tile has, by which kernels look past the end */
  int64_t queries = tensors[Q].shape[1], keys = tensors[K].shape[1], most = INT32_MAX - TILE - (queries > keys ? queries : keys);
  if (arg->type_index != kTVMFFIInt) return fail("TypeError", "%s is %s, wanted an int", extra->name, type_name(arg));
  if (arg->v_int64 < 0)
    return fail("ValueError", "%s is %lld, wanted a number of keys, zero or more", extra->name, (long long)arg->v_int64);
  if (arg->v_int64 > most) checked->v_int64 = most;
  return 0;
}

static int check_number(const Extra *extra, const TVMFFIAny *arg) {
  if (arg->type_index != kTVMFFIFloat && arg->type_index != kTVMFFIInt)
    return fail("TypeError", "%s is %s, wanted a number", extra->name, type_name(arg));
  double number = arg->type_index == kTVMFFIInt ? (double)arg->v_int64 : arg->v_float64;
  if (!isfinite((float)number) || (extra->kind == POSITIVE && !((float)number > 0)))
    return fail("ValueError", "%s is %g, wanted a number%s that is finite in float32", extra->name, number,
                extra->kind == POSITIVE ? " above zero" : "");
  return 0;
}

/* Type, shape and compact strides of a tensor argument; `plain` and `view` receive what those of the call's tensors do. */
static int check_operand(const Extra *extra, const TVMFFIAny *arg, const DLTensor tensors[TENSORS], DLTensor *plain, View *view) {
  static const char letters[] = "BHNM";
  static const char *const names[] = {"batch entries", "heads", "queries", "keys"};
  const int64_t sizes[] = {tensors[Q].shape[0], tensors[Q].shape[2], tensors[Q].shape[1], tensors[K].shape[1]};
  const DLTensor *tensor = as_tensor(arg);
  const Wanted wanted = {extra->name, extra->axes, extra->dtype, (int)strlen(extra->axes), {FREE, FREE, FREE, FREE}, true};
  if (tensor == NULL) return fail("TypeError", "%s is %s, wanted a tensor", extra->name, type_name(arg));
  if (check_type(&wanted, tensor, tensors[Q].device)) return -1;
  for (int axis = 0; axis < wanted.rank; ++axis) {
    int which = (int)(strchr(letters, extra->axes[axis]) - letters);
    if (tensor->shape[axis] != 1 && tensor->shape[axis] != sizes[which])
      return fail("ValueError", "%s.shape[%d] is %lld, wanted 1 or %lld, the number of %s", extra->name, axis, (long long)tensor->shape[axis],
                  (long long)sizes[which], names[which]);
  }
  if (check_strides(&wanted, tensor, view)) return -1;
  if (view->span > INT32_MAX) return fail("ValueError", "%s has 2^31 elements or more, wanted fewer: " SPLIT, extra->name);
  *plain = *tensor;
  /* An empty one gets some memory, of which kernels may read the first element. */
  const DLTensor *source = view->span ? tensor : &tensors[Q];
  plain->data = (char *)source->data + source->byte_offset;
  plain->byte_offset = 0;
  plain->strides = NULL;
  return 0;
}

/* Check one argument of a call. `checked` receives what the kernel gets; `plain` and `view`, of a tensor, what those of the call's tensors
 * do, and of anything else a view of nothing. */
static int check_extra(const Extra *extra, const TVMFFIAny *arg, const DLTensor tensors[TENSORS], TVMFFIAny *checked, DLTensor *plain,
                       View *view) {
  *checked = *arg;
  *view = (View){.odd = -1};
  if (extra->kind == COUNT) return check_count(extra, arg, checked, tensors);
  if (extra->kind != TENSOR) return check_number(extra, arg);
  if (check_operand(extra, arg, tensors, plain, view)) return -1;
  *checked = (TVMFFIAny){.type_index = kTVMFFIDLTensorPtr, .v_ptr = plain};
  return 0;
}
