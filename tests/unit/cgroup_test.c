#include "channel/base/cgroup.h"
#include "tests/lib/test.h"

/* A folder that stands for /. */
static char root[64];

static int setup(void **state)
{
    (void)state;
    snprintf(root, sizeof root, "/tmp/cox_cgroup_XXXXXX");
    return mkdtemp(root) ? 0 : -1;
}

static int teardown(void **state)
{
    char command[128];
    (void)state;
    snprintf(command, sizeof command, "rm -rf %s", root);
    return system(command);
}

#define TEST(name) TEST_WITH(name, setup, teardown)

static void put(const char *path, const char *text)
{
    char whole[512];
    snprintf(whole, sizeof whole, "%s%s", root, path);
    for (char *slash = whole + strlen(root) + 1; (slash = strchr(slash, '/')); slash++) {
        *slash = '\0';
        mkdir(whole, 0700);
        *slash = '/';
    }
    FILE *file = fopen(whole, "we");
    assert_non_null(file);
    assert_true(fputs(text, file) >= 0);
    assert_int_equal(fclose(file), 0);
}

/* A group is a folder with this file. */
static void put_group(const char *folder, const char *name, const char *text)
{
    char path[512];
    snprintf(path, sizeof path, "%s/cgroup.procs", folder);
    put(path, "");
    if (name) {
        snprintf(path, sizeof path, "%s/%s", folder, name);
        put(path, text);
    }
}

static struct cox_cgroup seen(void)
{
    static struct cox_cgroup cgroup;
    memset(&cgroup, 0xcc, sizeof cgroup);
    cox_cgroup_read(root, &cgroup);
    return cgroup;
}

static void limited(const struct cox_cgroup_limit *limit, uint64_t value, uint64_t used,
                    const char *file)
{
    assert_int_equal(limit->state, COX_CGROUP_LIMITED);
    assert_int_equal(limit->limit, value);
    assert_int_equal(limit->used, used);
    assert_int_equal(strncmp(limit->file, root, strlen(root)), 0);
    assert_string_equal(limit->file + strlen(root), file);
}

#define V2_MOUNT                                                                                   \
    "24 1 0:22 / /proc rw,nosuid - proc proc rw\n"                                                 \
    "31 23 0:27 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n"

TEST(what_is_not_mounted_is_unknown)
{
    struct cox_cgroup cgroup = seen(); /* no /proc at all */
    assert_int_equal(cgroup.cpu.state, COX_CGROUP_UNKNOWN);
    put("/proc/self/cgroup", "0::/\n");
    put("/proc/self/mountinfo", "24 1 0:22 / /proc rw - proc proc rw\n");
    cgroup = seen();
    assert_int_equal(cgroup.cpu.state, COX_CGROUP_UNKNOWN);
    assert_int_equal(cgroup.memory.state, COX_CGROUP_UNKNOWN);
    assert_int_equal(cgroup.pids.state, COX_CGROUP_UNKNOWN);
    /* Mounted, it is said, but nothing is there. */
    put("/proc/self/mountinfo", V2_MOUNT);
    assert_int_equal(seen().cpu.state, COX_CGROUP_UNKNOWN);
    /* Lines that make no sense. */
    put("/proc/self/cgroup", "\n:\n0\n0:\n");
    put("/proc/self/mountinfo", "\n - \n1 2 3\n - cgroup2 x y\n1 2 3 4 - cgroup2\n");
    assert_int_equal(seen().cpu.state, COX_CGROUP_UNKNOWN);
}

TEST(version_2_without_limits)
{
    put("/proc/self/cgroup", "0::/a.slice/b.scope\n");
    put("/proc/self/mountinfo", V2_MOUNT);
    put_group("/sys/fs/cgroup", NULL, NULL); /* the root of all has no such files */
    put_group("/sys/fs/cgroup/a.slice", "cpu.max", "max 100000\n");
    put_group("/sys/fs/cgroup/a.slice/b.scope", "memory.max", "max\n");
    put_group("/sys/fs/cgroup/a.slice/b.scope", "pids.max", "max\n");
    struct cox_cgroup cgroup = seen();
    assert_int_equal(cgroup.cpu.state, COX_CGROUP_NONE);
    assert_int_equal(cgroup.memory.state, COX_CGROUP_NONE);
    assert_int_equal(cgroup.pids.state, COX_CGROUP_NONE);
}

TEST(version_2_the_smallest_on_the_way_up_counts)
{
    put("/proc/self/cgroup", "0::/a.slice/b c/d.scope\n");
    put("/proc/self/mountinfo", V2_MOUNT);
    put_group("/sys/fs/cgroup", NULL, NULL);
    put_group("/sys/fs/cgroup/a.slice", "cpu.max", "150000 100000\n");
    put_group("/sys/fs/cgroup/a.slice/b c", "cpu.max", "max 100000\n");
    put_group("/sys/fs/cgroup/a.slice/b c/d.scope", "cpu.max", "400000 100000\n");
    put_group("/sys/fs/cgroup/a.slice", "memory.max", "1073741824\n");
    put_group("/sys/fs/cgroup/a.slice", "memory.current", "1000\n");
    put_group("/sys/fs/cgroup/a.slice/b c", "memory.max", "536870912\n");
    put_group("/sys/fs/cgroup/a.slice/b c", "memory.current", "4096\n");
    put_group("/sys/fs/cgroup/a.slice/b c/d.scope", "pids.max", "100\n");
    put_group("/sys/fs/cgroup/a.slice/b c/d.scope", "pids.current", "7\n");
    struct cox_cgroup cgroup = seen();
    limited(&cgroup.cpu, 1500000, 0, "/sys/fs/cgroup/a.slice/cpu.max");
    limited(&cgroup.memory, 536870912, 4096, "/sys/fs/cgroup/a.slice/b c/memory.max");
    limited(&cgroup.pids, 100, 7, "/sys/fs/cgroup/a.slice/b c/d.scope/pids.max");
    /* A neighbour's and a child's do not. */
    put_group("/sys/fs/cgroup/a.slice/other", "cpu.max", "1000 100000\n");
    put_group("/sys/fs/cgroup/a.slice/b c/d.scope/child", "cpu.max", "1000 100000\n");
    assert_int_equal(seen().cpu.limit, 1500000);
}

TEST(version_2_in_a_namespace_of_its_own)
{
    put("/proc/self/cgroup", "0::/\n");
    put("/proc/self/mountinfo", V2_MOUNT);
    put_group("/sys/fs/cgroup", "cpu.max", "50000 100000\n");
    struct cox_cgroup cgroup = seen();
    limited(&cgroup.cpu, 500000, 0, "/sys/fs/cgroup/cpu.max");
    assert_int_equal(cgroup.memory.state, COX_CGROUP_NONE);
    /* A group outside of it cannot be seen. */
    put("/proc/self/cgroup", "0::/../x\n");
    assert_int_equal(seen().cpu.state, COX_CGROUP_UNKNOWN);
}

#define V1_MOUNTS                                                                                  \
    "31 23 0:28 / /sys/fs/cgroup rw - tmpfs tmpfs rw,mode=755\n"                                   \
    "32 31 0:29 %s /sys/fs/cgroup/cpu,cpuacct rw master:9 - cgroup cgroup rw,cpu,cpuacct\n"        \
    "34 31 0:31 %s /sys/fs/cgroup/cpuset rw - cgroup cgroup rw,cpuset\n"                           \
    "35 31 0:32 %s /sys/fs/cgroup/my\\040memory rw - cgroup cgroup rw,memory\n"                    \
    "38 31 0:36 %s /sys/fs/cgroup/pids rw - cgroup cgroup rw,pids\n"                               \
    "41 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n"

static void put_v1(const char *mounted)
{
    char text[2048];
    snprintf(text, sizeof text, V1_MOUNTS, mounted, mounted, mounted, mounted);
    put("/proc/self/mountinfo", text);
    put("/proc/self/cgroup", "12:cpuset:/docker/ab\n"
                             "9:name=systemd:/docker/ab\n"
                             "8:pids:/docker/ab\n"
                             "4:memory:/docker/ab\n"
                             "1:cpu,cpuacct:/docker/ab\n"
                             "0::/docker/ab\n");
    put_group("/sys/fs/cgroup/unified/docker/ab", NULL, NULL); /* it has no controllers */
}

TEST(version_1_with_co_mounted_controllers)
{
    put_v1("/");
    const char *cpu = "/sys/fs/cgroup/cpu,cpuacct", *memory = "/sys/fs/cgroup/my memory";
    put_group(cpu, "cpu.cfs_quota_us", "-1\n");
    put_group(cpu, "cpu.cfs_period_us", "100000\n");
    put_group(memory, "memory.limit_in_bytes", "9223372036854771712\n");
    put_group("/sys/fs/cgroup/pids", NULL, NULL);
    put_group("/sys/fs/cgroup/cpu,cpuacct/docker", "cpu.cfs_quota_us", "300000\n");
    put_group("/sys/fs/cgroup/cpu,cpuacct/docker", "cpu.cfs_period_us", "200000\n");
    put_group("/sys/fs/cgroup/cpu,cpuacct/docker/ab", "cpu.cfs_quota_us", "-1\n");
    put_group("/sys/fs/cgroup/cpu,cpuacct/docker/ab", "cpu.cfs_period_us", "100000\n");
    put_group("/sys/fs/cgroup/my memory/docker/ab", "memory.limit_in_bytes",
              "9223372036854771712\n");
    put_group("/sys/fs/cgroup/pids/docker/ab", "pids.max", "64\n");
    put_group("/sys/fs/cgroup/pids/docker/ab", "pids.current", "3\n");
    put_group("/sys/fs/cgroup/pids/docker", "pids.max", "max\n");
    struct cox_cgroup cgroup = seen();
    limited(&cgroup.cpu, 1500000, 0, "/sys/fs/cgroup/cpu,cpuacct/docker/cpu.cfs_quota_us");
    assert_int_equal(cgroup.memory.state, COX_CGROUP_NONE);
    limited(&cgroup.pids, 64, 3, "/sys/fs/cgroup/pids/docker/ab/pids.max");
    put_group("/sys/fs/cgroup/my memory/docker", "memory.limit_in_bytes", "33554432\n");
    put_group("/sys/fs/cgroup/my memory/docker", "memory.usage_in_bytes", "5\n");
    cgroup = seen();
    limited(&cgroup.memory, 33554432, 5, "/sys/fs/cgroup/my memory/docker/memory.limit_in_bytes");
}

/* As a container without a namespace for groups sees it: only its own is mounted. */
TEST(version_1_mounted_from_the_own_group_on)
{
    put_v1("/docker/ab");
    put_group("/sys/fs/cgroup/cpu,cpuacct", "cpu.cfs_quota_us", "50000\n");
    put_group("/sys/fs/cgroup/cpu,cpuacct", "cpu.cfs_period_us", "100000\n");
    put_group("/sys/fs/cgroup/my memory", "memory.limit_in_bytes", "67108864\n");
    struct cox_cgroup cgroup = seen();
    limited(&cgroup.cpu, 500000, 0, "/sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us");
    limited(&cgroup.memory, 67108864, 0, "/sys/fs/cgroup/my memory/memory.limit_in_bytes");
    /* The controller is at version 1, and not mounted: version 2 knows nothing of it. */
    assert_int_equal(cgroup.pids.state, COX_CGROUP_UNKNOWN);
    put_v1("/docker/abc"); /* another one's, whose name only begins like that */
    assert_int_equal(seen().cpu.state, COX_CGROUP_UNKNOWN);
}

TEST(invalid_content_is_unknown)
{
    static const char *const texts[] = {"", "x 100000\n", "1000\n", "1000 0\n", "-5 100000\n"};
    put("/proc/self/cgroup", "0::/a/b\n");
    put("/proc/self/mountinfo", V2_MOUNT);
    put_group("/sys/fs/cgroup", NULL, NULL);
    put_group("/sys/fs/cgroup/a", "cpu.max", "max 100000\n");
    for (size_t i = 0; i < sizeof texts / sizeof texts[0]; i++) {
        put_group("/sys/fs/cgroup/a/b", "cpu.max", texts[i]);
        assert_int_equal(seen().cpu.state, COX_CGROUP_UNKNOWN);
    }
    /* A limit that is known stays one. */
    put_group("/sys/fs/cgroup/a", "cpu.max", "200000 100000\n");
    struct cox_cgroup cgroup = seen();
    limited(&cgroup.cpu, 2000000, 0, "/sys/fs/cgroup/a/cpu.max");
}

TEST(this_machine_s_are_read)
{
    struct cox_cgroup cgroup;
    cox_cgroup_read("", &cgroup);
    assert_in_range(cgroup.cpu.state, COX_CGROUP_UNKNOWN, COX_CGROUP_LIMITED);
    if (cgroup.cpu.state == COX_CGROUP_LIMITED)
        assert_int_equal(access(cgroup.cpu.file, F_OK), 0);
}
