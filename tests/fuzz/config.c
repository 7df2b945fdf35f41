/* A config.json of any bytes: refused, or every number is inside the range that config.h names. */
#include "fuzz.h"

#include "engine/model/share.h"

static void ranges_check(const struct cox_model_config *config)
{
    FUZZ_CHECK(config->hidden_size >= 1 && config->hidden_size <= 65536);
    FUZZ_CHECK(config->intermediate_size >= 1 && config->intermediate_size <= 1u << 20);
    FUZZ_CHECK(config->layer_count >= 1 && config->layer_count <= 1024);
    FUZZ_CHECK(config->head_count >= 1 && config->head_count <= 1024);
    FUZZ_CHECK(config->kv_head_count >= 1 && config->head_count % config->kv_head_count == 0);
    FUZZ_CHECK(config->head_dim >= 2 && config->head_dim % 2 == 0 && config->head_dim <= 1024);
    FUZZ_CHECK(config->vocab_size >= 2 && config->vocab_size <= 1u << 24);
    FUZZ_CHECK(config->position_count_max >= 1 && config->position_count_max <= 1u << 24);
    FUZZ_CHECK(config->rms_norm_eps > 0 && config->rms_norm_eps <= 0.1f);
    FUZZ_CHECK(config->rope_theta >= 1 && config->rope_theta <= 1e12);
    if (config->rope_type != COX_ROPE_DEFAULT) {
        FUZZ_CHECK(config->rope_type == COX_ROPE_LLAMA3);
        FUZZ_CHECK(config->rope_factor >= 1 && config->rope_factor <= 1e6);
        FUZZ_CHECK(config->rope_low_freq_factor >= 1e-6 && config->rope_low_freq_factor <= 1e6);
        FUZZ_CHECK(config->rope_high_freq_factor > config->rope_low_freq_factor &&
                   config->rope_high_freq_factor <= 2e6);
        FUZZ_CHECK(config->rope_original_position_count >= 1 &&
                   config->rope_original_position_count <= 1u << 24);
    }
    FUZZ_CHECK(cox_slice_count(config) >= 1 && cox_slice_count(config) <= COX_SLICE_COUNT_MAX &&
               config->head_count % cox_slice_count(config) == 0);
    FUZZ_CHECK(config->bos_token >= -1);
    FUZZ_CHECK(config->eos_token_count <= COX_EOS_TOKEN_COUNT_MAX);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static int fd = -1;
    static char path[64];
    if (fd < 0) {
        fd = memfd_create("config", MFD_CLOEXEC);
        FUZZ_CHECK(fd >= 0);
        snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    }
    FUZZ_CHECK(ftruncate(fd, 0) == 0 && pwrite(fd, data, size, 0) == (ssize_t)size);
    struct cox_model_config config, before;
    memset(&config, 0x5a, sizeof config);
    before = config;
    struct cox_error err = {0};
    int r = cox_model_config_load(path, &config, &err);
    if (r) {
        fuzz_check_error(r, &err);
        FUZZ_CHECK(r == COX_CORRUPT || r == COX_INVALID || r == COX_TOO_LARGE);
        FUZZ_CHECK(memcmp(&config, &before, sizeof config) == 0);
        return 0;
    }
    ranges_check(&config);
    return 0;
}
