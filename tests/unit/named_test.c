/* What every object in /dev/shm has in common: its name, its mode, and that what is attached is
 * what was checked. */
#include "channel/attach/named/names.h"
#include "channel/base/semaphore.h"
#include "channel/shm/control.h"
#include "channel/shm/region.h"

#include "channel_fixture.h"

/* A mark that an object has from its creation on. */
#define MARK 7

static int region_make(const char *name, unsigned mark, struct cox_error *err)
{
    struct cox_region region = {0};
    int r = cox_region_create(&region, name, 4096, err);
    if (r == 0)
        *(uint8_t *)region.base = (uint8_t)mark;
    assert_int_equal(region.base != NULL, r == 0);
    cox_region_detach(&region);
    return r;
}

static int region_attach(const char *name, enum cox_region_access access, unsigned *ret_mark,
                         struct cox_error *err)
{
    struct cox_region region = {0};
    int r = cox_region_attach(&region, name, 4096, access, err);
    assert_int_equal(region.base != NULL, r == 0);
    if (r == 0)
        *ret_mark = *(uint8_t *)region.base;
    cox_region_detach(&region);
    return r;
}

static int region_read(const char *name, unsigned *ret_mark, struct cox_error *err)
{
    return region_attach(name, COX_REGION_READ, ret_mark, err);
}

static int region_write(const char *name, unsigned *ret_mark, struct cox_error *err)
{
    return region_attach(name, COX_REGION_WRITE, ret_mark, err);
}

static int semaphore_make(const char *name, unsigned mark, struct cox_error *err)
{
    struct cox_semaphore semaphore = {0};
    int r = cox_semaphore_create(&semaphore, name, mark, err);
    assert_int_equal(semaphore.sem != NULL, r == 0);
    cox_semaphore_detach(&semaphore);
    return r;
}

static int semaphore_attach(const char *name, unsigned *ret_mark, struct cox_error *err)
{
    struct cox_semaphore semaphore = {0};
    int value = 0, r = cox_semaphore_attach(&semaphore, name, err);
    assert_int_equal(semaphore.sem != NULL, r == 0);
    if (r == 0)
        sem_getvalue(semaphore.sem, &value);
    *ret_mark = (unsigned)value;
    cox_semaphore_detach(&semaphore);
    return r;
}

/* Of a group of this name. */
static int control_make(const char *name, unsigned mark, struct cox_error *err)
{
    const struct cox_geometry_choice choice = {.depth = 1};
    struct cox_control control = COX_CONTROL_NONE;
    struct cox_geometry geometry;
    assert_int_equal(cox_geometry_resolve(1, &choice, &geometry, NULL), 0);
    int r = cox_control_create(&control, name + 1, &geometry, err);
    if (r == 0)
        atomic_store(&control.layout->abort.word, mark);
    cox_control_close(&control);
    return r;
}

static int control_attach(const char *name, unsigned *ret_mark, struct cox_error *err)
{
    struct cox_control control = COX_CONTROL_NONE;
    int r = cox_control_attach(&control, name + 1, err);
    assert_int_equal(control.layout != NULL, r == 0);
    if (r == 0)
        *ret_mark = (unsigned)atomic_load(&control.layout->abort.word);
    cox_control_close(&control);
    return r;
}

static const struct kind {
    /* of the file, around the name */
    const char *prefix, *suffix;
    int (*make)(const char *name, unsigned mark, struct cox_error *err);
    int (*attach)(const char *name, unsigned *ret_mark, struct cox_error *err);
    int (*unlink)(const char *name);
    /* as attach opens it */
    int flags;
    /* the longest name; from when on it is too long, with this in the text */
    size_t length_max, too_long;
    const char *text;
} kinds[] = {
    /* shm_open leaves room for one less than NAME_MAX. */
    {"", "", region_make, region_write, cox_region_unlink, O_RDWR, NAME_MAX, NAME_MAX + 2, ""},
    /* Opened for reading, a fifo or a directory gets as far as fstat. */
    {"", "", region_make, region_read, cox_region_unlink, O_RDONLY, NAME_MAX, NAME_MAX + 2, ""},
    /* "sem." goes in front. */
    {"sem.", "", semaphore_make, semaphore_attach, cox_semaphore_unlink, O_RDWR, NAME_MAX - 3,
     NAME_MAX - 2, "251"},
    {"", "_control", control_make, control_attach, NULL, O_RDWR, 0, 0, NULL},
};
#define KIND_COUNT (sizeof kinds / sizeof kinds[0])
/* Of which any file name may be given; the last one is named by its group. */
#define ANY_NAME_COUNT (KIND_COUNT - 1)
static const struct kind *kind;

static const char *path_of(const char *what)
{
    static char paths[2][600];
    static unsigned next;
    char *path = paths[next++ % 2];
    snprintf(path, sizeof paths[0], SHM "/%s%s%s", kind->prefix, test_name(what), kind->suffix);
    return path;
}

static void make_good(void)
{
    assert_ok(kind->make(test_object("a"), MARK, test_err()));
}

static int attach(struct cox_error *err)
{
    unsigned mark = 0;
    int r = kind->attach(test_object("a"), &mark, err);
    return r == 0 && mark != MARK ? cox_fail(err, COX_STALE, "another object, of mark %u", mark)
                                  : r;
}

LEAK_TEST(b44_impostors_are_denied)
{
    for (kind = kinds; kind < kinds + KIND_COUNT; kind++)
        refuses_impostors(path_of("a"), kind->flags, make_good, attach);
}

static void exchange_for_ever(void *context)
{
    const char *const *paths = context;
    while (renameat2(AT_FDCWD, paths[0], AT_FDCWD, paths[1], RENAME_EXCHANGE) == 0)
        sched_yield();
    _exit(1);
}

/* While the name changes hands, an attach is denied or maps the very file that passed the checks.
 */
LEAK_TEST(b44_what_was_checked_is_what_is_mapped)
{
    for (kind = kinds; kind < kinds + ANY_NAME_COUNT; kind++) {
        const char *const paths[] = {path_of("a"), path_of("b")};
        unsigned mapped = 0, denied = 0;
        make_good();
        assert_int_equal(kind->make(test_object("b"), 99, NULL), 0);
        assert_int_equal(chmod(paths[1], 0644), 0);
        pid_t pid = child_start(exchange_for_ever, (void *)(uintptr_t)paths);
        uint64_t deadline = cox_deadline_after_ms(300000); /* an emulated processor is slow */
        for (int i = 0; i < 20000 || mapped < 100 || denied < 100; i++) {
            int r = attach(NULL);
            assert_true(r == 0 || r == COX_DENIED);
            *(r ? &denied : &mapped) += 1;
            assert_true(cox_now_ns() < deadline);
        }
        child_kill(pid);
        assert_int_equal(unlink(paths[0]) | unlink(paths[1]), 0);
    }
}

static void create_under_umask(void *context)
{
    struct stat st;
    umask(*(const mode_t *)context);
    CHECK(kind->make(test_object("a"), MARK, NULL) == 0);
    CHECK(stat(path_of("a"), &st) == 0 && (st.st_mode & 07777) == 0600);
    CHECK(attach(NULL) == 0 && unlink(path_of("a")) == 0);
}

LEAK_TEST(b45_the_mode_is_0600_under_any_umask)
{
    static mode_t masks[] = {0000, 0777, 0277, 0022, 0177};
    for (kind = kinds; kind < kinds + KIND_COUNT; kind++)
        for (size_t i = 0; i < sizeof masks / sizeof masks[0]; i++)
            child_run(create_under_umask, &masks[i]);
}

LEAK_TEST(b43_a_stale_object_is_not_adopted)
{
    for (kind = kinds; kind < kinds + ANY_NAME_COUNT; kind++) {
        make_good();
        assert_refused(kind->make(test_object("a"), 0, test_err()), COX_TAKEN, test_object("a"));
        assert_int_equal(attach(NULL), 0); /* it is still there, as it was */
        assert_int_equal(kind->unlink(test_object("a")), 0);
        assert_int_equal(kind->unlink(test_object("a")), 0); /* already gone */
        assert_refused(attach(test_err()), COX_NOT_FOUND, test_object("a"));
    }
}

LEAK_TEST(names_are_a_slash_and_no_other)
{
    static const char *const bad[] = {"", "/", "name", "/a/b", "//", "a/", "/../x", "../x"};
    char name[400];
    unsigned mark;
    for (kind = kinds; kind < kinds + ANY_NAME_COUNT; kind++) {
        for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
            assert_refused(kind->make(bad[i], 0, test_err()), COX_INVALID, "slash");
            assert_int_equal(kind->attach(bad[i], &mark, NULL), COX_INVALID);
        }
        int head = snprintf(name, sizeof name, "%s", test_object("long"));
        memset(name + head, 'x', sizeof name - (size_t)head);
        for (size_t length = kind->too_long; length < sizeof name; length += 30) {
            char longer[sizeof name];
            memcpy(longer, name, sizeof longer);
            longer[length] = '\0';
            assert_refused(kind->make(longer, 0, test_err()), COX_TOO_LARGE, kind->text);
            assert_int_equal(kind->attach(longer, &mark, NULL), COX_TOO_LARGE);
        }
        name[kind->length_max] = '\0';
        assert_int_equal(kind->make(name, 0, NULL), 0);
        assert_int_equal(kind->unlink(name), 0);
    }
}
