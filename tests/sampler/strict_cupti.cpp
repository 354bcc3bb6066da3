// A strict stand-in for libcupti, compiled against NVIDIA's own headers: it checks what the
// documentation requires of a caller, and notes the first violation (`strict_fault`).
//
//   sizes and nulls of every structure; the order of calls; objects that are given back once; a
//   config image that stays as it was; counter data that is blank before each decode; metrics
//   that are evaluated in the order in which they were configured.
//
// The device's clock stands still but for `strict_advance`, so that tests do not depend on how fast
// they run. A window is as long as it was configured. Its values are those of `value_of`. As reported of the
// real one: windows that are decoded after the image was full have zero stamps.

#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <set>
#include <string>
#include <vector>

#include <cuda.h>
#include <cupti_result.h>
#include <cupti_version.h>
#include <cupti_target.h>
#include <cupti_profiler_target.h>
#include <cupti_profiler_host.h>
#include <cupti_pmsampling.h>

namespace {

constexpr uint64_t kMagic = 0x53545249435421ull;
constexpr size_t kAvailability = 333;
constexpr uint8_t kConfigByte = 0x5a;

struct Window { uint64_t start, end; };
struct Image { uint64_t magic, num; };  // windows follow

struct Host { std::vector<std::string> metrics; bool has_availability; };

struct State {
    std::string fault;
    uint64_t now_ns = 0, interval_ns = 0, decoded_ns = 0;
    uint32_t most_samples = 0;
    int num_initialized = 0;
    bool was_full = false, is_enabled = false, is_configured = false, is_started = false;
    const uint8_t* config = nullptr;
    size_t config_size = 0, num_metrics = 0;
    std::set<Host*> hosts;
    std::vector<std::string> requested;
} state;

char sampler;  // whose address is the object

CUptiResult fault(const char* form, ...) {
    char text[256];
    va_list given;
    va_start(given, form);
    vsnprintf(text, sizeof text, form, given);
    va_end(given);
    if (state.fault.empty()) state.fault = text;
    return CUPTI_ERROR_INVALID_PARAMETER;
}

#define REQUIRE(condition) \
    do { if (!(condition)) return fault("%s: not %s", __func__, #condition); } while (0)
#define CHECK(type)                                                                       \
    REQUIRE(p != nullptr);                                                                \
    if (p->structSize != type##_STRUCT_SIZE)                                              \
        return fault("%s: size %zu, not %zu", __func__, p->structSize, (size_t)type##_STRUCT_SIZE); \
    REQUIRE(p->pPriv == nullptr)
#define CHECK_SAMPLER(type) \
    CHECK(type);            \
    REQUIRE(state.is_enabled && p->pPmSamplingObject == (CUpti_PmSampling_Object*)&sampler)
#define CHECK_HOST(type) \
    CHECK(type);         \
    REQUIRE(state.hosts.count((Host*)p->pHostObject))

uint64_t real_ns() {
    timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    return now.tv_sec * 1000000000ull + now.tv_nsec;
}

Window* windows(const void* image) { return (Window*)((uint8_t*)image + sizeof(Image)); }

// Percent, hertz or an amount, by the name of the metric.
double value_of(const char* metric) {
    if (strstr(metric, "per_second")) return 1.5e9;
    if (strstr(metric, "pct")) return 50.0;
    return 1e6;
}

}  // namespace

extern "C" {

void strict_reset() {
    for (Host* host : state.hosts) delete host;
    state = State();
    state.now_ns = real_ns();
}
const char* strict_fault() { return state.fault.c_str(); }
void strict_advance(uint64_t ns) { state.now_ns += ns; }
uint32_t strict_most_samples() { return state.most_samples; }
int strict_num_open() {
    return state.num_initialized + state.is_enabled + state.is_started + (int)state.hosts.size();
}


CUptiResult cuptiGetVersion(uint32_t* version) {
    *version = CUPTI_API_VERSION;
    return CUPTI_SUCCESS;
}

CUptiResult cuptiGetResultString(CUptiResult, const char** text) {
    *text = "CUPTI_ERROR_STRICT";
    return CUPTI_SUCCESS;
}

CUptiResult cuptiProfilerInitialize(CUpti_Profiler_Initialize_Params* p) {
    CHECK(CUpti_Profiler_Initialize_Params);
    state.num_initialized++;
    return CUPTI_SUCCESS;
}

CUptiResult cuptiProfilerDeInitialize(CUpti_Profiler_DeInitialize_Params* p) {
    CHECK(CUpti_Profiler_DeInitialize_Params);
    REQUIRE(state.num_initialized > 0);
    REQUIRE(!state.is_enabled);
    state.num_initialized--;
    return CUPTI_SUCCESS;
}

CUptiResult cuptiDeviceGetChipName(CUpti_Device_GetChipName_Params* p) {
    CHECK(CUpti_Device_GetChipName_Params);
    REQUIRE(state.num_initialized > 0);
    p->pChipName = "GH100";
    return CUPTI_SUCCESS;
}

CUptiResult cuptiPmSamplingGetCounterAvailability(CUpti_PmSampling_GetCounterAvailability_Params* p) {
    CHECK(CUpti_PmSampling_GetCounterAvailability_Params);
    REQUIRE(state.num_initialized > 0);
    if (!p->pCounterAvailabilityImage) {
        p->counterAvailabilityImageSize = kAvailability;
        return CUPTI_SUCCESS;
    }
    REQUIRE(p->counterAvailabilityImageSize == kAvailability);
    memset(p->pCounterAvailabilityImage, 7, kAvailability);
    return CUPTI_SUCCESS;
}

CUptiResult cuptiProfilerHostInitialize(CUpti_Profiler_Host_Initialize_Params* p) {
    CHECK(CUpti_Profiler_Host_Initialize_Params);
    REQUIRE(p->profilerType == CUPTI_PROFILER_TYPE_PM_SAMPLING);
    REQUIRE(p->pChipName && std::string(p->pChipName) == "GH100");
    REQUIRE(!p->pCounterAvailabilityImage || p->pCounterAvailabilityImage[kAvailability - 1] == 7);
    Host* host = new Host{{}, p->pCounterAvailabilityImage != nullptr};
    state.hosts.insert(host);
    p->pHostObject = (CUpti_Profiler_Host_Object*)host;
    return CUPTI_SUCCESS;
}

#if CUPTI_API_VERSION >= 130200
// By whose presence the longer structure above is known.
CUptiResult cuptiProfilerHostGetSinglePassSets(CUpti_Profiler_Host_GetSinglePassSets_Params*) {
    return fault("%s: not expected", __func__);
}
#endif

CUptiResult cuptiProfilerHostDeinitialize(CUpti_Profiler_Host_Deinitialize_Params* p) {
    CHECK_HOST(CUpti_Profiler_Host_Deinitialize_Params);
    state.hosts.erase((Host*)p->pHostObject);
    delete (Host*)p->pHostObject;
    return CUPTI_SUCCESS;
}

CUptiResult cuptiProfilerHostConfigAddMetrics(CUpti_Profiler_Host_ConfigAddMetrics_Params* p) {
    CHECK_HOST(CUpti_Profiler_Host_ConfigAddMetrics_Params);
    REQUIRE(p->numMetrics > 0);
    Host* host = (Host*)p->pHostObject;
    host->metrics.assign(p->ppMetricNames, p->ppMetricNames + p->numMetrics);
    return CUPTI_SUCCESS;
}

CUptiResult cuptiProfilerHostGetConfigImageSize(CUpti_Profiler_Host_GetConfigImageSize_Params* p) {
    CHECK_HOST(CUpti_Profiler_Host_GetConfigImageSize_Params);
    p->configImageSize = 2544;
    return CUPTI_SUCCESS;
}

CUptiResult cuptiProfilerHostGetConfigImage(CUpti_Profiler_Host_GetConfigImage_Params* p) {
    CHECK_HOST(CUpti_Profiler_Host_GetConfigImage_Params);
    REQUIRE(p->pConfigImage && p->configImageSize == 2544);
    memset(p->pConfigImage, kConfigByte, p->configImageSize);
    return CUPTI_SUCCESS;
}

CUptiResult cuptiProfilerHostGetNumOfPasses(CUpti_Profiler_Host_GetNumOfPasses_Params* p) {
    CHECK(CUpti_Profiler_Host_GetNumOfPasses_Params);
    REQUIRE(p->pConfigImage && p->configImageSize == 2544);
    p->numOfPasses = 1;
    return CUPTI_SUCCESS;
}

CUptiResult cuptiProfilerHostEvaluateToGpuValues(CUpti_Profiler_Host_EvaluateToGpuValues_Params* p) {
    CHECK_HOST(CUpti_Profiler_Host_EvaluateToGpuValues_Params);
    Host* host = (Host*)p->pHostObject;
    REQUIRE(host->has_availability);
    REQUIRE(p->rangeIndex < ((Image*)p->pCounterDataImage)->num);
    REQUIRE(p->numMetrics == host->metrics.size());
    for (size_t i = 0; i < p->numMetrics; i++) {
        REQUIRE(host->metrics[i] == p->ppMetricNames[i]);
        p->pMetricValues[i] = value_of(p->ppMetricNames[i]);
    }
    return CUPTI_SUCCESS;
}

CUptiResult cuptiPmSamplingEnable(CUpti_PmSampling_Enable_Params* p) {
    CHECK(CUpti_PmSampling_Enable_Params);
    REQUIRE(state.num_initialized > 0);
    REQUIRE(!state.is_enabled);
    state.is_enabled = true;
    p->pPmSamplingObject = (CUpti_PmSampling_Object*)&sampler;
    return CUPTI_SUCCESS;
}

CUptiResult cuptiPmSamplingDisable(CUpti_PmSampling_Disable_Params* p) {
    CHECK_SAMPLER(CUpti_PmSampling_Disable_Params);
    REQUIRE(!state.is_started);
    state.is_enabled = state.is_configured = false;
    return CUPTI_SUCCESS;
}

CUptiResult cuptiPmSamplingSetConfig(CUpti_PmSampling_SetConfig_Params* p) {
    CHECK_SAMPLER(CUpti_PmSampling_SetConfig_Params);
    REQUIRE(p->pConfig && p->configSize == 2544);
    REQUIRE(p->hardwareBufferSize > 0);
    REQUIRE(p->samplingInterval > 0);
    REQUIRE(p->triggerMode == CUPTI_PM_SAMPLING_TRIGGER_MODE_GPU_TIME_INTERVAL);
    REQUIRE(p->hwBufferAppendMode == CUPTI_PM_SAMPLING_HARDWARE_BUFFER_APPEND_MODE_KEEP_LATEST);
    state.config = p->pConfig;
    state.config_size = p->configSize;
    state.interval_ns = p->samplingInterval;
    state.is_configured = true;
    return CUPTI_SUCCESS;
}

CUptiResult cuptiPmSamplingGetCounterDataSize(CUpti_PmSampling_GetCounterDataSize_Params* p) {
    CHECK_SAMPLER(CUpti_PmSampling_GetCounterDataSize_Params);
    REQUIRE(state.is_configured);
    REQUIRE(p->maxSamples > 0 && p->numMetrics > 0);
    state.most_samples = p->maxSamples;
    p->counterDataSize = sizeof(Image) + sizeof(Window) * (size_t)p->maxSamples;
    return CUPTI_SUCCESS;
}

CUptiResult cuptiPmSamplingCounterDataImageInitialize(CUpti_PmSampling_CounterDataImage_Initialize_Params* p) {
    CHECK_SAMPLER(CUpti_PmSampling_CounterDataImage_Initialize_Params);
    REQUIRE(p->counterDataSize == sizeof(Image) + sizeof(Window) * (size_t)state.most_samples);
    memset(p->pCounterData, 0, p->counterDataSize);
    ((Image*)p->pCounterData)->magic = kMagic;
    return CUPTI_SUCCESS;
}

CUptiResult cuptiPmSamplingStart(CUpti_PmSampling_Start_Params* p) {
    CHECK_SAMPLER(CUpti_PmSampling_Start_Params);
    REQUIRE(state.is_configured && !state.is_started);
    state.is_started = true;
    state.decoded_ns = state.now_ns;
    return CUPTI_SUCCESS;
}

CUptiResult cuptiPmSamplingStop(CUpti_PmSampling_Stop_Params* p) {
    CHECK_SAMPLER(CUpti_PmSampling_Stop_Params);
    REQUIRE(state.is_started);
    state.is_started = false;
    return CUPTI_SUCCESS;
}

CUptiResult cuptiPmSamplingDecodeData(CUpti_PmSampling_DecodeData_Params* p) {
    CHECK_SAMPLER(CUpti_PmSampling_DecodeData_Params);
    REQUIRE(state.is_started);
    for (size_t i = 0; i < state.config_size; i++) REQUIRE(state.config[i] == kConfigByte);
    Image* image = (Image*)p->pCounterDataImage;
    REQUIRE(p->counterDataImageSize == sizeof(Image) + sizeof(Window) * (size_t)state.most_samples);
    REQUIRE(image->magic == kMagic);
    REQUIRE(image->num == 0);
    p->overflow = 0;
    p->decodeStopReason = CUPTI_PM_SAMPLING_DECODE_STOP_REASON_END_OF_RECORDS;
    while (state.decoded_ns + state.interval_ns <= state.now_ns) {
        if (image->num == state.most_samples) {
            p->decodeStopReason = CUPTI_PM_SAMPLING_DECODE_STOP_REASON_COUNTER_DATA_FULL;
            break;
        }
        const uint64_t start = state.decoded_ns;
        state.decoded_ns += state.interval_ns;
        windows(image)[image->num++] = state.was_full ? Window{0, 0} : Window{start, state.decoded_ns};
    }
    state.was_full = p->decodeStopReason == CUPTI_PM_SAMPLING_DECODE_STOP_REASON_COUNTER_DATA_FULL;
    return CUPTI_SUCCESS;
}

CUptiResult cuptiPmSamplingGetCounterDataInfo(CUpti_PmSampling_GetCounterDataInfo_Params* p) {
    CHECK(CUpti_PmSampling_GetCounterDataInfo_Params);
    const Image* image = (const Image*)p->pCounterDataImage;
    REQUIRE(image && image->magic == kMagic);
    p->numTotalSamples = state.most_samples;
    p->numPopulatedSamples = p->numCompletedSamples = image->num;
    return CUPTI_SUCCESS;
}

CUptiResult cuptiPmSamplingCounterDataGetSampleInfo(CUpti_PmSampling_CounterData_GetSampleInfo_Params* p) {
    CHECK_SAMPLER(CUpti_PmSampling_CounterData_GetSampleInfo_Params);
    const Image* image = (const Image*)p->pCounterDataImage;
    REQUIRE(p->sampleIndex < image->num);
    p->startTimestamp = windows(image)[p->sampleIndex].start;
    p->endTimestamp = windows(image)[p->sampleIndex].end;
    return CUPTI_SUCCESS;
}

}  // extern "C"
