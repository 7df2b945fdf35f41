/* The memory of the rank group, made, renewed and given back, with each of these calls failing in
 * turn. */
#include "channel/shm/region.h"
#include "channel/attach/named/windows.h"
#include "countdown.h"
#include "testing.h"

#define LIFE 5

static struct cox_geometry geometry;

static const char *group_name(void)
{
    static char name[64];
    return countdown_name(name, "w");
}

static void geometry_make(void)
{
    const struct cox_geometry_choice choice = {.depth = 1};
    assert_int_equal(cox_geometry_resolve(2, &choice, &geometry, NULL), 0);
}

static uint64_t bytes_of(int fd)
{
    struct stat st;
    assert_int_equal(fstat(fd, &st), 0);
    assert_int_equal(st.st_size, cox_geometry_group_object_size(&geometry));
    return (uint64_t)st.st_blocks * 512;
}

/* ---- made ---- */

static int named_create(void *object, struct cox_error *err)
{
    char name[COX_OBJECT_NAME_SIZE];
    int r = cox_windows_create_named(group_name(), &geometry, err);
    if (r == 0)
        r = cox_region_open(cox_name_group(name, group_name()), COX_REGION_WRITE, object, err);
    if (r)
        cox_region_unlink(cox_name_group(name, group_name()));
    return r;
}

static void named_destroy(void *object)
{
    char name[COX_OBJECT_NAME_SIZE];
    int *fd = object;
    assert_int_equal(bytes_of(*fd), cox_geometry_group_size(&geometry));
    cox_close_fd(fd);
    assert_int_equal(cox_region_unlink(cox_name_group(name, group_name())), 0);
}

/* ---- renewed ---- */

static int there = -1;

/* Every window was written to. */
static void there_prepare(void)
{
    static char dirt[4096];
    memset(dirt, 'x', sizeof dirt);
    assert_ok(cox_region_create_unnamed_sparse("windows", cox_geometry_group_object_size(&geometry),
                                               F_SEAL_SEAL, &there, test_err()));
    for (uint64_t life = 0; life < COX_GROUP_WINDOW_COUNT; life++)
        assert_int_equal(
            pwrite(there, dirt, sizeof dirt, (off_t)cox_geometry_group_offset(&geometry, life)),
            sizeof dirt);
}

static char byte_of(uint64_t life)
{
    char byte = 0;
    assert_int_equal(pread(there, &byte, 1, (off_t)cox_geometry_group_offset(&geometry, life)), 1);
    return byte;
}

/* What has been done, to be looked at where nothing fails. */
static bool renewed, kept;

static void there_restore(void)
{
    if (renewed) {
        assert_int_equal(byte_of(LIFE), 0);
        assert_int_equal(byte_of(LIFE - 1), 'x');
        assert_int_equal(byte_of(LIFE + 1), 'x');
    }
    if (kept) {
        assert_int_equal(byte_of(LIFE), 'x');
        assert_int_equal(byte_of(LIFE - 1), 0);
        assert_int_equal(byte_of(LIFE + 1), 0);
        assert_true(bytes_of(there) <= cox_geometry_group_size(&geometry));
    }
    renewed = kept = false;
    cox_close_fd(&there);
}

static int renew(void *object, struct cox_error *err)
{
    (void)object;
    int r = cox_windows_renew(there, &geometry, LIFE, err);
    renewed = r == 0;
    return r;
}

static int keep(void *object, struct cox_error *err)
{
    (void)object;
    int r = cox_windows_keep(there, &geometry, LIFE);
    kept = r == 0;
    return r ? cox_fail(err, r, "%s", cox_status_text(r)) : 0;
}

COUNTDOWN_TEST(b4_b15_b19_b47_no_window_stays_when_any_call_fails, EACH_MODE,
               SUBJECT(named_create, MAKES(int, named_destroy), .lenient = true, .in_place = true),
               SUBJECT(renew, AROUND(there_prepare, there_restore), .lenient = true),
               SUBJECT(keep, AROUND(there_prepare, there_restore)))

int main(void)
{
    geometry_make();
    return test_run(NULL, NULL);
}
