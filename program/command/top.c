/* coxswain top: the ranks of running groups, again every second, on a terminal; or once as text.
 * coxswain list: a line for each of these groups. */
#include "channel/base/idioms.h"
#include "channel/shm/geometry.h"
#include "program/cli/client_command.h"
#include "program/cli/console.h"
#include "program/cli/group_options.h"
#include "proto/control.pb-c.h"
#include "program/stacks/stacks_command.h"
#include "top_table.h"

#include <curses.h>
#include <inttypes.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define INTERVAL_MS_DEFAULT 1000
#define INTERVAL_MS_MIN 100
/* A group that does not reply within that is passed over, and asked again after RETRY_NS. */
#define REPLY_MS 500
#define RETRY_NS (5 * COX_NSEC_PER_SEC)
/* Without names on the command line: so often groups that are new are looked for. */
#define NAMES_NS (3 * COX_NSEC_PER_SEC)
#define GROUP_COUNT_MAX 64
#define GROUP_NAME_SIZE 160
#define LINE_COUNT_MIN 6
/* Of what K shows, and how long that may take. */
#define STACKS_SIZE 8192
#define STACKS_MS 3000
#define COLUMN_COUNT_MIN 40

struct top_choice {
    int count;
    char *const *names;
    /* by --name, as for other commands; NULL: none is */
    const char *name;
    uint64_t interval_ms;
    bool once;
    enum cox_top_column sort;
};

struct source {
    char name[GROUP_NAME_SIZE];
    struct cox_client client;
    bool connected;
    /* not asked before; 0: now */
    uint64_t retry_ns;
};

struct top {
    const struct top_choice *choice;
    struct cox_top_table *table;
    struct source sources[GROUP_COUNT_MAX];
    uint32_t source_count;
    uint64_t names_ns;
    enum cox_top_column sort;
    bool reverse;
    /* the first row of ranks that is shown */
    uint32_t first;
    /* the keys are shown in place of ranks */
    bool helps;
    /* where the ranks of each group stand is shown in place of ranks; "": nowhere */
    char stacks[STACKS_SIZE];
};

/* ---- samples ---- */

static void source_add(void *context, const char *name)
{
    struct top *top = context;
    for (uint32_t i = 0; i < top->source_count; i++)
        if (strcmp(top->sources[i].name, name) == 0)
            return;
    if (top->source_count == GROUP_COUNT_MAX)
        return;
    struct source *source = &top->sources[top->source_count++];
    *source = (struct source){.client = COX_CLIENT_NONE};
    snprintf(source->name, sizeof source->name, "%s", name);
}

/* Also a group that does not reply. One that is known by its socket's path alone is left out. */
static int source_found(void *context, struct cox_client *client, const struct cox_error *failure,
                        struct cox_error *err)
{
    (void)failure, (void)err;
    if (!strchr(client->group, '/'))
        source_add(context, client->group);
    return 0;
}

/* Returns 0, or the reason why there is no sample of the group. */
static int source_ask(struct top *top, struct source *source, struct cox_error *err)
{
    const uint64_t deadline_ns = cox_deadline_after_ms(REPLY_MS);
    CoxswainControl__StatusReply *status;
    int r = 0;
    if (!source->connected)
        r = cox_client_open(&source->client, source->name, deadline_ns, err);
    source->connected = r == 0;
    if (r == 0)
        r = cox_client_status(&source->client, deadline_ns, &status, err);
    if (r == 0)
        r = cox_top_table_put(top->table, source->name, status, cox_now_ns());
    return r;
}

static void top_sample(struct top *top)
{
    const uint64_t now_ns = cox_now_ns();
    if (top->choice->count == 0 && !top->choice->name && now_ns >= top->names_ns) {
        cox_client_find(source_found, top, cox_deadline_after_ms(REPLY_MS), NULL);
        top->names_ns = now_ns + NAMES_NS;
    }
    for (uint32_t i = 0; i < top->source_count; i++) {
        struct source *source = &top->sources[i];
        struct cox_error error = {0};
        if (now_ns < source->retry_ns || source_ask(top, source, &error) == 0)
            continue;
        cox_client_close(&source->client);
        source->connected = false;
        source->retry_ns = error.code == COX_TIMEOUT ? now_ns + RETRY_NS : 0;
        cox_client_clean_text(error.text);
        cox_top_table_fail(top->table, source->name, error.text);
    }
    cox_top_table_format(top->table, top->sort, top->reverse);
}

/* Asks each group that is shown where its ranks stand. */
static void top_ask_stacks(struct top *top)
{
    size_t used = 0;
    for (uint32_t i = 0; i < top->source_count && used < sizeof top->stacks; i++) {
        struct source *source = &top->sources[i];
        const CoxswainControl__StacksReply *reply = NULL;
        struct cox_error error = {0};
        if (!source->connected)
            continue;
        const int r =
            cox_stacks_ask(&source->client, NULL, cox_deadline_after_ms(STACKS_MS), &reply, &error);
        cox_client_clean_text(error.text);
        const int length =
            snprintf(top->stacks + used, sizeof top->stacks - used, "%s: %s\n", source->name,
                     r ? error.text : (reply->text ? reply->text : ""));
        used += length > 0 ? (size_t)length : 0;
    }
}

/* ---- as text ---- */

/* Why there is no group to show. */
static int none_found(struct cox_error *err)
{
    _cox_cleanup_(cox_client_close) struct cox_client client = COX_CLIENT_NONE;
    int r = cox_client_open(&client, NULL, cox_deadline_after_ms(REPLY_MS), err);
    return r ? r : cox_fail(err, COX_NOT_FOUND, "the group has just started: try again");
}

/* No group has ranks to show: tells why on standard error, as status does. */
static void failures_say(const struct top *top)
{
    for (uint32_t i = 0; i < cox_top_table_group_count(top->table); i++) {
        const char *line = cox_top_table_group_line(top->table, i);
        const char *reason = strstr(line, ": "); /* behind the name, which has none */
        cox_console_say("%s", reason ? reason + 2 : line);
    }
}

/* Returns the exit status. */
static int groups_sample(struct top *top)
{
    struct cox_error error = {0};
    top_sample(top);
    if (top->source_count == 0) {
        none_found(&error);
        cox_exit_with(&error);
        return COX_EXIT_FAILED;
    }
    if (top->choice->interval_ms) { /* rates need two samples */
        cox_client_pause_ms(top->choice->interval_ms);
        top_sample(top);
    }
    return COX_EXIT_OK;
}

static int groups_print(struct top *top)
{
    const int status = groups_sample(top);
    for (uint32_t i = 0; status == COX_EXIT_OK && i < cox_top_table_group_count(top->table); i++)
        puts(cox_top_table_group_line(top->table, i));
    return status;
}

static int top_print(struct top *top)
{
    const int status = groups_sample(top);
    if (status)
        return status;
    const uint32_t rank_count = cox_top_table_rank_count(top->table);
    if (rank_count == 0) {
        failures_say(top);
        return COX_EXIT_FAILED;
    }
    for (uint32_t i = 0; i < cox_top_table_group_count(top->table); i++)
        puts(cox_top_table_group_line(top->table, i));
    printf("\n%s\n", cox_top_table_heading(top->table));
    for (uint32_t i = 0; i < rank_count; i++)
        puts(cox_top_table_rank_line(top->table, i));
    return COX_EXIT_OK;
}

/* ---- on a terminal ---- */

static volatile sig_atomic_t ended_by;

static void on_signal(int number)
{
    ended_by = number;
}

/* Pairs of colours are numbered by the health that they show. */
static void colours_start(void)
{
    if (!has_colors())
        return;
    start_color();
    use_default_colors();
    init_pair(COX_TOP_HELD, COLOR_YELLOW, -1);
    init_pair(COX_TOP_DEAD, COLOR_RED, -1);
}

static int colour_of(enum cox_top_health health)
{
    return health != COX_TOP_WELL && has_colors() ? (int)COLOR_PAIR(health) : A_NORMAL;
}

/* One line, cut off at the right. */
static void draw_line(int line, const char *text, int attributes)
{
    attrset(attributes);
    mvaddnstr(line, 0, text, COLS);
    clrtoeol();
    attrset(A_NORMAL);
}

static void draw_keys(const struct top *top)
{
    char text[128];
    snprintf(text, sizeof text, "q quit  ? keys  sorted by %s%s", cox_top_columns[top->sort].name,
             top->reverse ? "^" : "*");
    draw_line(LINES - 1, text, A_REVERSE);
}

/* From `line` on. */
static void draw_help(int line)
{
    char text[128];
    for (int i = 0; i < COX_TOP_COLUMN_COUNT && line < LINES - 1; i++, line++) {
        snprintf(text, sizeof text, "  %c  sort by %s; again: the other way round",
                 cox_top_columns[i].key, cox_top_columns[i].name);
        draw_line(line, text, A_NORMAL);
    }
    if (line < LINES - 1)
        draw_line(line++, "  K  where each rank stands (coxswain stacks shows all of it)",
                  A_NORMAL);
    if (line < LINES - 1)
        draw_line(line, "  arrows and pages scroll; any other key ends this help", A_NORMAL);
}

/* From `line` on, as many lines as there is room for. */
static void draw_stacks(const struct top *top, int line)
{
    for (const char *text = top->stacks; *text && line < LINES - 1;) {
        size_t length = strcspn(text, "\n");
        const bool whole = length <= (size_t)COLS;
        length = whole ? length : (size_t)COLS;
        mvaddnstr(line++, 0, text, (int)length);
        clrtoeol();
        text += length + (whole && text[length] == '\n');
    }
}

/* From `line` on. */
static void draw_ranks(struct top *top, int line)
{
    const uint32_t ranks = cox_top_table_rank_count(top->table);
    draw_line(line++, cox_top_table_heading(top->table), A_BOLD);
    const uint32_t room = (uint32_t)(LINES - line - 1);
    const uint32_t last = ranks > room ? ranks - room : 0;
    top->first = top->first < last ? top->first : last;
    for (uint32_t i = 0; i < room && top->first + i < ranks; i++)
        draw_line(line++, cox_top_table_rank_line(top->table, top->first + i),
                  colour_of(cox_top_table_rank_health(top->table, top->first + i)));
}

static void draw(struct top *top)
{
    const int lines = LINES;
    char text[128];
    erase();
    if (lines < LINE_COUNT_MIN || COLS < COLUMN_COUNT_MIN) {
        snprintf(text, sizeof text, "%d x %d is too small: at least %d x %d", COLS, lines,
                 COLUMN_COUNT_MIN, LINE_COUNT_MIN);
        draw_line(0, text, A_NORMAL);
        refresh();
        return;
    }
    const uint32_t groups = cox_top_table_group_count(top->table);
    int line = 0;
    /* Groups take half of the lines at most. */
    for (uint32_t i = 0; i < groups && line < lines / 2 - 1; i++)
        draw_line(line++, cox_top_table_group_line(top->table, i),
                  colour_of(cox_top_table_group_health(top->table, i)));
    if (groups == 0) {
        struct cox_error error = {0};
        none_found(&error);
        cox_client_clean_text(error.text);
        draw_line(line++, error.text, A_NORMAL);
    }
    if (top->helps)
        draw_help(line);
    else if (top->stacks[0])
        draw_stacks(top, line);
    else
        draw_ranks(top, line);
    draw_keys(top);
    refresh();
}

/* Returns false if it ends. */
static bool key_take(struct top *top, int key)
{
    const uint32_t page = LINES > LINE_COUNT_MIN ? (uint32_t)LINES / 2 : 1;
    if (key == 'q')
        return false;
    if (key != KEY_RESIZE)
        top->stacks[0] = '\0';
    if (key == 'K')
        top_ask_stacks(top);
    if (key != KEY_RESIZE)
        top->helps = key == '?' && !top->helps;
    if (key == KEY_DOWN || key == KEY_NPAGE)
        top->first += key == KEY_DOWN ? 1 : page;
    if (key == KEY_UP || key == KEY_PPAGE) {
        const uint32_t step = key == KEY_UP ? 1 : page;
        top->first -= top->first < step ? top->first : step;
    }
    for (int i = 0; i < COX_TOP_COLUMN_COUNT; i++)
        if (key == cox_top_columns[i].key) {
            top->reverse = top->sort == (enum cox_top_column)i && !top->reverse;
            top->sort = (enum cox_top_column)i;
            top->first = 0;
        }
    return true;
}

static void top_loop(struct top *top)
{
    while (!ended_by) {
        top_sample(top);
        draw(top);
        const uint64_t next_ns = cox_deadline_after_ms(top->choice->interval_ms);
        for (uint64_t now_ns; !ended_by && (now_ns = cox_now_ns()) < next_ns;) {
            timeout((int)((next_ns - now_ns) / COX_NSEC_PER_MSEC + 1));
            const int key = getch(); /* KEY_RESIZE too; ERR: nothing was typed */
            if (key == ERR)
                continue;
            if (!key_take(top, key))
                return;
            cox_top_table_format(top->table, top->sort, top->reverse);
            draw(top);
        }
    }
}

static int top_show(struct top *top)
{
    struct cox_error error = {0};
    if (!isatty(STDOUT_FILENO) || !isatty(STDIN_FILENO)) {
        cox_fail(&error, COX_INVALID,
                 "standard input or output is no terminal: --once prints once");
        return cox_exit_with(&error);
    }
    /* curses leaves signals alone that have a handler, and would end the process in its own. */
    const struct sigaction action = {.sa_handler = on_signal};
    sigaction(SIGINT, &action, NULL);
    sigaction(SIGTERM, &action, NULL);
    sigaction(SIGHUP, &action, NULL);
    SCREEN *screen = newterm(NULL, stdout, stdin);
    if (!screen) {
        const char *name = getenv("TERM");
        cox_fail(&error, COX_INVALID,
                 "the terminal '%s' (TERM) is not known here, or cannot move its cursor: --once "
                 "prints once",
                 name ? name : "");
        return cox_exit_with(&error);
    }
    cbreak();
    noecho();
    keypad(stdscr, TRUE);
    curs_set(0);
    colours_start();
    top_loop(top);
    endwin();
    delscreen(screen);
    return ended_by ? cox_exit_interrupted(ended_by) : COX_EXIT_OK;
}

/* ---- the command ---- */

static int run_with(const struct top_choice *choice, int (*show)(struct top *top))
{
    struct cox_error error = {0};
    struct top *top = calloc(1, sizeof *top);
    int status = COX_EXIT_FAILED;
    if (!top || cox_top_table_new(&top->table)) {
        free(top);
        cox_fail(&error, -ENOMEM, "no memory");
        return cox_exit_with(&error);
    }
    top->choice = choice;
    top->sort = choice->sort;
    for (int i = 0; i < choice->count; i++)
        source_add(top, choice->names[i]);
    if (choice->name)
        source_add(top, choice->name);
    status = show(top);
    for (uint32_t i = 0; i < top->source_count; i++)
        cox_client_close(&top->sources[i].client);
    cox_top_table_free(top->table);
    free(top);
    return status;
}

static int run(void *context)
{
    const struct top_choice *choice = context;
    return run_with(choice, choice->once ? top_print : top_show);
}

static int run_list(void *unused)
{
    const struct top_choice all = {0};
    (void)unused;
    return run_with(&all, groups_print);
}

static int take_interval(void *member, const char *value, struct cox_error *err)
{
    uint64_t *interval_ms = member;
    int r = cox_parse_seconds("--interval", value, interval_ms, err);
    return r || *interval_ms >= INTERVAL_MS_MIN
               ? r
               : cox_fail(err, COX_INVALID, "--interval is %s: at least 0.1", value);
}

static int take_sort(void *member, const char *value, struct cox_error *err)
{
    enum cox_top_column *sort = member;
    for (int i = 0; i < COX_TOP_COLUMN_COUNT; i++)
        if (strcmp(value, cox_top_columns[i].name) == 0) {
            *sort = (enum cox_top_column)i;
            return 0;
        }
    return cox_fail(err, COX_INVALID,
                    "--sort is '%s': expected rank, state, steps, p99, wait, cpu, memory or deaths",
                    value);
}

static int take_names(void *context, int count, char *const *words, struct cox_error *err)
{
    struct top_choice *choice = context;
    if (count + !!choice->name > GROUP_COUNT_MAX)
        return cox_fail(err, COX_INVALID, "%d groups: at most %d", count + !!choice->name,
                        GROUP_COUNT_MAX);
    for (int i = 0; i < count; i++) {
        int r = cox_name_check(words[i], err);
        if (r)
            return r;
    }
    choice->count = count;
    choice->names = words;
    return 0;
}

static void init(void *context)
{
    struct top_choice *choice = context;
    choice->interval_ms = INTERVAL_MS_DEFAULT;
}

static const struct cox_option options[] = {
    {"name", "NAME", "this group; the same as NAME as an argument",
     COX_NAME(struct top_choice, name)},
    {"once", NULL, "print it once as text, after one interval; needs no terminal",
     COX_FLAG(struct top_choice, once)},
    {"interval", "SEC", "ask the groups again after this time (default 1)",
     COX_TAKE(struct top_choice, interval_ms, take_interval)},
    {"sort", "rank|state|steps|p99|wait|cpu|memory|deaths",
     "order of the rows (default rank); a key on the terminal changes it",
     COX_TAKE(struct top_choice, sort, take_sort)},
    {0},
};
static const struct cox_option_group top_options = {.options = options};

const struct cox_command cox_command_top = {
    .name = "top",
    .summary = "watch the ranks of running groups",
    .arguments = "[NAME]...",
    .text =
        "Shows a row for each rank of the groups named, or of all groups of this user, again "
        "every second: what it does on the execute channel and for how long, the number of the "
        "request, requests per second, the median and the 99th percentile of its steps since "
        "the start, the part of the last interval that it waited for other ranks and that it "
        "used a processor, its memory, and the deaths of its processes. '-' is what it does not "
        "tell: workers of opaque requests report no times. No worker is asked.\n"
        "\n"
        "Rows of ranks that are stopped are yellow, those of dead ones red. Keys: ? shows them, q "
        "ends.\n"
        "\n"
        "The exit status is 0; with --once 1 when no group has replied; 2 for wrong usage.",
    .examples = "  coxswain top                       all groups of this user\n"
                "  coxswain top mine --sort wait\n"
                "  coxswain top --once | head -20\n",
    .choice_size = sizeof(struct top_choice),
    .init = init,
    .groups = {{&top_options, 0}},
    .words = take_names,
    .run = run,
};

const struct cox_command cox_command_list = {
    .name = "list",
    .summary = "list the running groups of this user",
    .text = "Prints a line for each running group of this user: its name, its ranks, its state, "
            "and what keeps it from working.\n"
            "\n"
            "The exit status is 1 when there is none.",
    .examples = "  coxswain list\n",
    .run = run_list,
};
