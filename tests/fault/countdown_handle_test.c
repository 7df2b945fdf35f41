/* By-value handles: exporter, importer, exporting and opening, with each of their calls failing in
 * turn. The exporter is a process of its own where the handle is another's. */
#include "channel/handle/handle_internal.h"
#include "countdown.h"
#include "testing.h"

#include <coxswain/handle.h>

#define OBJECT_SIZE 8192

static struct cox_handle foreign; /* of the child */
static struct cox_handle own;     /* of `exporter` */
static struct cox_exporter *exporter;
static struct cox_importer *importer;
static int object_fd;

/* ---- constructors ---- */

CONSTRUCT(self_load, cox_handle_self_load(object, err))
CONSTRUCT(exporter_new, cox_exporter_new(NULL, object, err))
DESTROY(exporter_free, cox_exporter_free(*(struct cox_exporter **)object))

static int importer_new(void *object, struct cox_error *err)
{
    const struct cox_importer_options options = {
        .size = sizeof(struct cox_importer_options), .socket_path = "/nonexistent", .cache_max = 3};
    return cox_importer_new(&options, object, err);
}

DESTROY(importer_free, cox_importer_free(*(struct cox_importer **)object))

/* ---- exporting ---- */

static void exporter_prepare(void)
{
    assert_int_equal(cox_exporter_new(NULL, &exporter, NULL), 0);
    assert_int_equal(cox_exporter_export(exporter, object_fd, 0, 0, &own, NULL), 0);
}

static void exporter_restore(void)
{
    exporter = cox_exporter_free(exporter);
}

CONSTRUCT(export, cox_exporter_export(exporter, object_fd, 100, 1000, object, err))
DESTROY(put, assert_int_equal(cox_exporter_put(exporter, object), 0))

/* ---- opening ---- */

CONSTRUCT(open_foreign, cox_handle_open(&foreign, NULL, 0, object, err))
CONSTRUCT(open_own, cox_handle_open(&own, NULL, 0, object, err))
DESTROY(fd_close, cox_close_fd(object))

static void importer_prepare(void)
{
    exporter_prepare();
    assert_int_equal(cox_importer_new(NULL, &importer, NULL), 0);
}

/* With the exporter's pidfd kept from an earlier open. */
static void importer_prepare_known(void)
{
    const struct cox_import *import;
    importer_prepare();
    assert_int_equal(cox_importer_open(importer, &foreign, COX_IMPORT_READ, &import, NULL), 0);
    cox_importer_close(importer, import);
}

static void importer_prepare_open(void)
{
    const struct cox_import *import;
    importer_prepare();
    assert_int_equal(cox_importer_open(importer, &foreign, COX_IMPORT_READ, &import, NULL), 0);
}

static void importer_restore(void)
{
    importer = cox_importer_free(importer);
    exporter_restore();
}

CONSTRUCT(import_foreign, cox_importer_open(importer, &foreign, COX_IMPORT_READ, object, err))
CONSTRUCT(import_own, cox_importer_open(importer, &own, COX_IMPORT_WRITE, object, err))
DESTROY(import_close, cox_importer_close(importer, *(const struct cox_import **)object))

PLAIN_TEST(b15_b19_b29_b47_any_call_may_fail)
{
    COUNTDOWN(EACH_MODE, SUBJECT(self_load, .size = sizeof(struct cox_handle_self)),
              SUBJECT(exporter_new, MAKES(struct cox_exporter *, exporter_free)),
              SUBJECT(importer_new, MAKES(struct cox_importer *, importer_free)),
              /* The number that is its turn may be too high. */
              NAMED_SUBJECT("exporter_export", export, MAKES(struct cox_handle, put),
                            AROUND(exporter_prepare, exporter_restore), .lenient = true),
              NAMED_SUBJECT("handle_open of another process", open_foreign, MAKES(int, fd_close)),
              NAMED_SUBJECT("handle_open of this process", open_own, MAKES(int, fd_close),
                            AROUND(exporter_prepare, exporter_restore)),
              NAMED_SUBJECT("importer_open of another process", import_foreign,
                            MAKES(struct cox_import *, import_close),
                            AROUND(importer_prepare, importer_restore)),
              NAMED_SUBJECT("importer_open of an exporter that is known", import_foreign,
                            MAKES(struct cox_import *, import_close),
                            AROUND(importer_prepare_known, importer_restore)),
              NAMED_SUBJECT("importer_open of this process", import_own,
                            MAKES(struct cox_import *, import_close),
                            AROUND(importer_prepare, importer_restore)));
    /* It makes one call, after which nothing follows. An exporter whose liveness cannot be checked
     * counts as alive. */
    COUNTDOWN(FAIL_ONE | INTERRUPT,
              NAMED_SUBJECT("importer_open of what is open", import_foreign,
                            MAKES(struct cox_import *, import_close),
                            AROUND(importer_prepare_open, importer_restore), .lenient = true));
}

static void child_say(void *ret)
{
    struct cox_exporter *of_child;
    COX_ASSERT(cox_exporter_new(NULL, &of_child, NULL) == 0);
    COX_ASSERT(cox_exporter_export(of_child, object_fd, 0, 0, ret, NULL) == 0);
}

int main(void)
{
    object_fd = memfd_create("countdown", MFD_CLOEXEC);
    COX_ASSERT(object_fd >= 0 && ftruncate(object_fd, OBJECT_SIZE) == 0);
    pid_t pid = countdown_child(child_say, &foreign, sizeof foreign);
    int failed = test_run(NULL, NULL);
    test_kill_child(pid);
    return failed;
}
