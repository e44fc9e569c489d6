/* NVIDIA's management library, as far as the agent asks it, with answers that a test sets: in its own process by the
 * functions fake_*, in another one by a file that $FAKE_NVML names: the driver, then a line `USED TOTAL MODE MODEL` for
 * each GPU. Built as libnvidia-ml.so.1, so that nvidia-ml-py itself is what is tested (its binding names each function
 * as NVIDIA's nvml.h does).
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { SUCCESS = 0, NOT_SUPPORTED = 3, DRIVER_NOT_LOADED = 9, GPU_IS_LOST = 15 };

typedef struct {
    unsigned long long total, free, used;
} memory_t;

static int init_result, count, mig[8], lost = -1;
static unsigned long long used[8], total[8];
static char driver[80], models[8][96];
static int open_calls;

void fake_reset(int result, const char *version) {
    init_result = result;
    count = 0;
    lost = -1;
    snprintf(driver, sizeof driver, "%s", version);
}

/* mode: 0 not partitioned, 1 partitioned, 2 a model that can't be */
void fake_add(const char *model, unsigned long long used_bytes, unsigned long long total_bytes, int mode) {
    snprintf(models[count], sizeof models[count], "%s", model);
    used[count] = used_bytes;
    total[count] = total_bytes;
    mig[count++] = mode;
}

void fake_lose(int index) { lost = index; }

int fake_open_calls(void) { return open_calls; }

static void read_file(void) {
    const char *path = getenv("FAKE_NVML");
    FILE *file = path ? fopen(path, "r") : NULL;
    if (!file)
        return;
    init_result = fscanf(file, "%79s", driver) == 1 ? SUCCESS : DRIVER_NOT_LOADED;
    for (count = 0; count < 8; count++)
        if (fscanf(file, "%llu %llu %d %95[^\n]", &used[count], &total[count], &mig[count], models[count]) != 4)
            break;
    fclose(file);
}

int nvmlInit_v2(void) {
    read_file();
    return init_result ? init_result : (open_calls++, SUCCESS);
}
int nvmlInitWithFlags(unsigned int flags) { return flags ? NOT_SUPPORTED : nvmlInit_v2(); }
int nvmlShutdown(void) { return open_calls--, SUCCESS; }

const char *nvmlErrorString(int result) {
    return result == DRIVER_NOT_LOADED ? "Driver Not Loaded" : result == GPU_IS_LOST ? "GPU is lost" : "Not Supported";
}

int nvmlSystemGetDriverVersion(char *version, unsigned int length) {
    return snprintf(version, length, "%s", driver), SUCCESS;
}

int nvmlDeviceGetCount_v2(unsigned int *devices) { return *devices = (unsigned int)count, SUCCESS; }

/* A handle is the index, plus one: NULL is none. */
int nvmlDeviceGetHandleByIndex_v2(unsigned int index, void **device) {
    return *device = (void *)(size_t)(index + 1), SUCCESS;
}

int nvmlDeviceGetName(void *device, char *name, unsigned int length) {
    return snprintf(name, length, "%s", models[(size_t)device - 1]), SUCCESS;
}

int nvmlDeviceGetUUID(void *device, char *uuid, unsigned int length) {
    return snprintf(uuid, length, "GPU-%zu", (size_t)device - 1), SUCCESS;
}

int nvmlDeviceGetMemoryInfo(void *device, memory_t *memory) {
    size_t index = (size_t)device - 1;
    if ((int)index == lost)
        return GPU_IS_LOST;
    memory->total = total[index];
    memory->used = used[index];
    memory->free = total[index] - used[index];
    return SUCCESS;
}

int nvmlDeviceGetMigMode(void *device, unsigned int *current, unsigned int *pending) {
    int mode = mig[(size_t)device - 1];
    if (mode == 2)
        return NOT_SUPPORTED;
    *current = *pending = (unsigned int)mode;
    return SUCCESS;
}
