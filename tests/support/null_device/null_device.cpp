// SPDX-License-Identifier: Apache-2.0
//
// The active parts of CUDA's runtime, driver and cuBLAS for a device that computes nothing: its memory is the host's,
// kernels are counted and not run, and copies to the host are zeros, so that two results never differ. null_device.py
// adds all other functions, which only return 0.

#include <dlfcn.h>
#include <driver_types.h>

#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <utility>

namespace {

std::atomic<long> launches{0};
std::atomic<int> captures{0}, capturing{0};  // the current capture, or 0

template <class Value>
int give(Value* to, Value value) {
  if (to) *to = value;
  return 0;
}

/// Returns a unique handle.
int give_new(void** to) {
  static std::atomic<std::uintptr_t> last{0};
  return give(to, reinterpret_cast<void*>(last += 16));
}

int launch() {
  ++launches;
  return 0;
}

int minor_capability() {
  const char* const asked = std::getenv("NULL_DEVICE_MINOR");
  return asked ? std::atoi(asked) : 0;
}

constexpr std::pair<int, int> attributes[] = {
    {cudaDevAttrComputeCapabilityMajor, 9},
    {cudaDevAttrMultiProcessorCount, 132},
    {cudaDevAttrWarpSize, 32},
    {cudaDevAttrMaxThreadsPerBlock, 1024},
    {cudaDevAttrMaxThreadsPerMultiProcessor, 2048},
    {cudaDevAttrMaxRegistersPerBlock, 65'536},
    {cudaDevAttrMaxRegistersPerMultiprocessor, 65'536},
    {cudaDevAttrMaxSharedMemoryPerBlock, 49'152},
    {cudaDevAttrMaxSharedMemoryPerBlockOptin, 232'448},
    {cudaDevAttrMaxSharedMemoryPerMultiprocessor, 233'472},
    {cudaDevAttrL2CacheSize, 4096},  // small, because torch's tuning repeatedly writes this amount
};

int attribute(int number) {
  if (number == cudaDevAttrComputeCapabilityMinor) return minor_capability();
  for (auto& [known, value] : attributes)
    if (known == number) return value;
  return 0;
}

constexpr std::size_t memory = std::size_t{139} << 30;

/// The default stream never captures.
int status(void* stream, int* to) { return give(to, stream && capturing ? 1 : 0); }

}  // namespace

extern "C" {

long null_device_launches() { return launches; }

// The device.
int cudaGetDeviceCount(int* count) { return give(count, 1); }
int cudaGetDevice(int* device) { return give(device, 0); }
int cudaDriverGetVersion(int* version) { return give(version, 13'000); }
int cudaRuntimeGetVersion(int* version) { return give(version, 13'000); }
int cudaDeviceGetAttribute(int* value, int number, int) { return give(value, attribute(number)); }
int cudaDeviceCanAccessPeer(int* can, int, int) { return give(can, 0); }
int cudaDeviceGetStreamPriorityRange(int* least, int* greatest) { return give(least, 0) + give(greatest, 0); }
int cudaMemGetInfo(std::size_t* free, std::size_t* total) { return give(free, memory) + give(total, memory); }
int cudaGetDeviceProperties(cudaDeviceProp* to, int) {
  *to = {};
  std::strcpy(to->name, "null device");
  to->major = 9;
  to->minor = minor_capability();
  to->totalGlobalMem = memory;
  to->multiProcessorCount = attribute(cudaDevAttrMultiProcessorCount);
  to->warpSize = attribute(cudaDevAttrWarpSize);
  to->maxThreadsPerBlock = attribute(cudaDevAttrMaxThreadsPerBlock);
  to->maxThreadsPerMultiProcessor = attribute(cudaDevAttrMaxThreadsPerMultiProcessor);
  to->l2CacheSize = attribute(cudaDevAttrL2CacheSize);
  to->sharedMemPerBlock = static_cast<std::size_t>(attribute(cudaDevAttrMaxSharedMemoryPerBlock));
  to->sharedMemPerBlockOptin = static_cast<std::size_t>(attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin));
  to->sharedMemPerMultiprocessor = static_cast<std::size_t>(attribute(cudaDevAttrMaxSharedMemoryPerMultiprocessor));
  to->regsPerBlock = to->regsPerMultiprocessor = attribute(cudaDevAttrMaxRegistersPerBlock);
  for (int i = 0; i < 3; ++i) {
    to->maxThreadsDim[i] = i < 2 ? 1024 : 64;
    to->maxGridSize[i] = i < 1 ? 2'147'483'647 : 65'535;
  }
  return 0;
}

// Memory.
int cudaMalloc(void** to, std::size_t bytes) { return give(to, std::calloc((bytes + 511) / 512, 512)); }
int cudaMallocAsync(void** to, std::size_t bytes, void*) { return cudaMalloc(to, bytes); }
int cudaMallocHost(void** to, std::size_t bytes) { return cudaMalloc(to, bytes); }
int cudaHostAlloc(void** to, std::size_t bytes, unsigned) { return cudaMalloc(to, bytes); }
int cudaFree(void* memory) { return std::free(memory), 0; }
int cudaFreeAsync(void* memory, void*) { return std::free(memory), 0; }
int cudaFreeHost(void* memory) { return std::free(memory), 0; }
int cudaMemcpy(void* to, const void* from, std::size_t bytes, int kind) {
  if (kind == cudaMemcpyDeviceToHost)
    std::memset(to, 0, bytes);
  else
    std::memmove(to, from, bytes);
  return 0;
}
int cudaMemcpyAsync(void* to, const void* from, std::size_t bytes, int kind, void*) {
  return cudaMemcpy(to, from, bytes, kind);
}
int cudaMemset(void* to, int value, std::size_t bytes) { return std::memset(to, value, bytes), 0; }
int cudaMemsetAsync(void* to, int value, std::size_t bytes, void*) { return cudaMemset(to, value, bytes); }
int cudaPointerGetAttributes(cudaPointerAttributes* to, void* pointer) {
  *to = {};
  to->type = cudaMemoryTypeDevice;
  to->devicePointer = pointer;
  return 0;
}

// Streams, events and graphs.
int cudaStreamCreate(void** to) { return give_new(to); }
int cudaStreamCreateWithFlags(void** to, unsigned) { return give_new(to); }
int cudaStreamCreateWithPriority(void** to, unsigned, int) { return give_new(to); }
int cudaEventCreate(void** to) { return give_new(to); }
int cudaEventCreateWithFlags(void** to, unsigned) { return give_new(to); }
int cudaEventElapsedTime(float* milliseconds, void*, void*) { return give(milliseconds, 100.F); }  // no long tuning
int cudaStreamIsCapturing(void* stream, int* to) { return status(stream, to); }
int cudaStreamGetCaptureInfo(void* stream, int* to, unsigned long long* id, void** graph, void** nodes, void** edges,
                             std::size_t* count) {
  give(id, static_cast<unsigned long long>(capturing));
  give<void*>(nodes, nullptr);
  give<void*>(edges, nullptr);
  give(count, std::size_t{0});
  give_new(graph);
  return status(stream, to);
}
int cudaStreamBeginCapture(void*, int) { return capturing = ++captures, 0; }
int cudaStreamEndCapture(void*, void** graph) { return capturing = 0, give_new(graph); }
int cudaGraphInstantiate(void** to, void*, unsigned long long) { return give_new(to); }
int cudaGraphInstantiateWithFlags(void** to, void*, unsigned long long) { return give_new(to); }
int cudaGraphGetNodes(void*, void**, std::size_t* count) { return give(count, std::size_t{1}); }
int cudaUserObjectCreate(void** to, void*, void*, unsigned, unsigned) { return give_new(to); }

// Kernels.
void** __cudaRegisterFatBinary(void*) {
  static void* handle = nullptr;
  return &handle;
}
int __cudaGetKernel(void** kernel, void* function) { return give(kernel, function); }
int __cudaLaunchKernel() { return launch(); }
int cudaLaunchKernel() { return launch(); }
int cudaLaunchKernelExC() { return launch(); }
int cudaFuncGetAttributes(cudaFuncAttributes* to, void*) {
  *to = {};
  to->maxThreadsPerBlock = 1024;
  to->ptxVersion = to->binaryVersion = 90;
  return 0;
}
int cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* count) { return give(count, 2); }
int cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* count) { return give(count, 2); }
const char* cudaGetErrorString(int) { return "an error of the null device"; }
const char* cudaGetErrorName(int) { return "null device"; }
int cudaGetDriverEntryPointByVersion(const char* name, void** to, unsigned, unsigned long long, int* result) {
  give(to, dlsym(RTLD_DEFAULT, name));
  return give(result, *to ? 0 : 1);
}

// The driver.
int cuDriverGetVersion(int* version) { return give(version, 13'000); }
int cuDeviceGetCount(int* count) { return give(count, 1); }
int cuDeviceGet(int* device, int) { return give(device, 0); }
int cuCtxGetDevice(int* device) { return give(device, 0); }
int cuCtxGetCurrent(void** context) { return give_new(context); }
int cuDevicePrimaryCtxRetain(void** context, int) { return give_new(context); }
int cuDevicePrimaryCtxGetState(int, unsigned* flags, int* active) { return give(flags, 0U) + give(active, 1); }
int cuDeviceGetAttribute(int* value, int number, int) { return give(value, attribute(number)); }
int cuGetErrorString(int, const char** to) { return give(to, "an error of the null device"); }
int cuStreamIsCapturing(void* stream, int* to) { return status(stream, to); }
int cuModuleLoadData(void** module, const void* image) {
  constexpr int invalid_image = 200;
  return std::memcmp(image, "\177ELF", 4) ? invalid_image : give_new(module);
}
int cuModuleGetFunction(void** function, void*, const char*) { return give_new(function); }
int cuFuncGetAttribute(int* value, int number, void*) { return give(value, number == 0 ? 1024 : 0); }  // 0: threads
int cuLaunchKernel(void* function, unsigned x, unsigned y, unsigned z) {
  constexpr int invalid_value = 1;
  return function && x && y && z ? launch() : invalid_value;
}
int cuLaunchKernelEx() { return launch(); }
int cuPointerGetAttribute(void** to, int, void* pointer) { return give(to, pointer); }
int cuOccupancyMaxActiveClusters(int* count) { return give(count, 1); }

// cuBLAS and cuDNN.
int cublasCreate_v2(void** handle) { return give_new(handle); }
int cublasLtCreate(void** handle) { return give_new(handle); }
int cublasLtMatmulAlgoGetHeuristic(void*, void*, void*, void*, void*, void*, void*, int, void*, int* count) {
  return give(count, 1);
}
std::size_t cudnnGetVersion() { return 91'000; }  // an old one, of which LibTorch does not take the attention first

}  // extern "C"
