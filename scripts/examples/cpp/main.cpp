// Calls an artefact on random float32 tensors, on the CPU or the GPU that it was built for, and prints how far its output is from attention
// in double: build/cpp/flash_attention build/attention.so
#include <dlfcn.h>
#include <tvm/ffi/extra/json.h>
#include <tvm/ffi/extra/module.h>
#include <tvm/ffi/tvm_ffi.h>

#include <cmath>
#include <cstdio>
#include <random>
namespace ffi = tvm::ffi;
constexpr int64_t B = 2, N = 37, M = 50, H = 4, G = 2;  // batch, queries, keys, heads, key heads

ffi::Module Load(const char *path) {
  const std::string missing = dlopen("libtvm_runtime_cuda.so", RTLD_NOW | RTLD_GLOBAL) ? "" : dlerror();  // only CUDA artefacts need it
  try {
    return ffi::Module::LoadFromFile(path);
  } catch (const ffi::Error &error) {
    if (missing.empty() || error.message().find("{cuda}") == std::string::npos) throw;
    TVM_FFI_THROW(RuntimeError) << "TVM's CUDA runtime is wanted, found " << missing << ": install it, or export for --target cpu";
  }
}

// The largest error of out [B, N, H, dv] for q [B, N, H, d], k [B, M, G, d] and v [B, M, G, dv].
double LargestError(const float *q, const float *k, const float *v, const float *out, int64_t d, int64_t dv, bool causal) {
  double worst = 0;
  for (int64_t row = 0; row < B * N * H; ++row) {
    const int64_t b = row / (N * H), i = row / H % N, g = row % H / (H / G), keys = causal ? i + M - N + 1 : M;
    std::vector<double> sums(dv + 1);  // of exp(s) v, and of exp(s): the scores of such data are small
    for (int64_t j = 0, key = b * M * G + g; j < keys; ++j, key += G) {
      double s = 0;
      for (int64_t c = 0; c < d; ++c) s += double(q[row * d + c]) * k[key * d + c] / std::sqrt(double(d));
      for (int64_t c = 0; c <= dv; ++c) sums[c] += std::exp(s) * (c < dv ? v[key * dv + c] : 1);
    }
    for (int64_t c = 0; c < dv; ++c) worst = std::fmax(worst, std::fabs(sums[c] / sums[dv] - out[row * dv + c]));
  }
  return worst;
}

int main(int argc, char **argv) try {
  if (argc != 2) TVM_FFI_THROW(ValueError) << "one argument is wanted, found " << argc - 1 << ": name an artefact of scripts.export";
  const ffi::Module module = Load(argv[1]);
  const auto told = module->GetFunction("flash_attention_manifest");
  if (!told) TVM_FFI_THROW(ValueError) << "an artefact of scripts.export is wanted, found no manifest in " << argv[1] << ": export one";
  const ffi::Any manifest = ffi::json::Parse((*told)().cast<ffi::String>());
  const auto in = [](const ffi::Any &map, const char *key) { return map.cast<ffi::json::Object>()[ffi::String(key)]; };
  const auto workload = in(manifest, "workload"), target = in(in(manifest, "variants").cast<ffi::json::Array>()[0], "target");
  const auto name = in(workload, "name").cast<std::string>(), mask = in(workload, "mask").cast<std::string>();
  const auto d = in(workload, "head_dim").cast<int64_t>(), dv = in(workload, "value_dim").cast<int64_t>();
  const std::string plain = "fwd_d" + std::to_string(d) + "_dv" + std::to_string(dv) + "_f32_";
  if (name != plain + "full" && name != plain + "causal")
    TVM_FFI_THROW(ValueError) << "a workload like d64_f32_causal is wanted, found " << name << ": export one";

  const auto allocate = ffi::Function::GetGlobalRequired("runtime.TVMTensorAllocWithScope");
  const auto upload = ffi::Function::GetGlobalRequired("runtime.TVMTensorCopyFromBytes");
  const DLDevice device = {in(target, "kind").cast<std::string>() == "cuda" ? kDLCUDA : kDLCPU, 0};
  std::mt19937 random(0);
  const auto make = [&](const ffi::Shape &shape, std::vector<float> &host) {
    for (int64_t i = 0; i < shape.Product(); ++i) host.push_back(std::normal_distribution<float>()(random));
    auto tensor = allocate(shape, DLDataType{kDLFloat, 32, 1}, device, nullptr).cast<ffi::Tensor>();
    upload(tensor, static_cast<void *>(host.data()), host.size() * sizeof(float));
    return tensor;
  };
  std::vector<float> q, k, v, out, lse;
  const auto of_q = make({B, N, H, d}, q), of_k = make({B, M, G, d}, k), of_v = make({B, M, G, dv}, v);
  const auto of_out = make({B, N, H, dv}, out), of_lse = make({B, H, N}, lse);
  module->GetFunction("flash_attention_forward").value()(of_q, of_k, of_v, of_out, of_lse, 1 / std::sqrt(double(d)));
  ffi::Function::GetGlobalRequired("runtime.TVMTensorCopyToBytes")(of_out, static_cast<void *>(out.data()), out.size() * sizeof(float));
  const double error = LargestError(q.data(), k.data(), v.data(), out.data(), d, dv, mask == "causal");
  std::printf("%s: largest error %.1e\n", name.c_str(), error);
  return error < 1e-4 ? 0 : 1;
} catch (const ffi::Error &error) {
  std::fprintf(stderr, "error: %s\n", error.message().c_str());
  return 1;
}
